"""The columns of a run's tables: what each row keeps, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

NOTHING = "–"  # noqa: RUF001


def _nothing(dense: dict[str, Any]) -> str:
    return NOTHING


def always(row: dict[str, Any]) -> bool:
    return True


class Column(NamedTuple):
    """A heading, what it means, a row's entry, the baseline's, and for which rows there is something to say."""

    head: str
    means: str
    of: Callable[[dict[str, Any]], str]
    base: Callable[[dict[str, Any]], str] = _nothing
    told: Callable[[dict[str, Any]], bool] = always


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    if value is None:
        return NOTHING
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def _times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}x"


def _ms(stage: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: number(row["time_ms"][stage])


def _of_out(what: str) -> Callable[[dict[str, Any]], str]:
    def entry(row: dict[str, Any]) -> str:
        if "check" not in row:
            return NOTHING
        value = row["check"]["quantities"]["out"][what]
        return "not finite" if value is None else number(value)

    return entry


def _used(row: dict[str, Any]) -> str:
    if "check" not in row:
        return NOTHING
    parts = row["check"]["quantities"].values()
    if any(p["error"] is None or p["budget"] is None for p in parts):
        return "not finite"
    return f"{max((p['error'] / p['budget'] for p in parts if p['error']), default=0.0):.0%}"


def _checked(row: dict[str, Any]) -> str:
    return f"{row['check']['rows']} of {row['queries']}" if "check" in row else NOTHING


CHECKS = (
    Column(
        "check",
        "against the fp64 reference",
        lambda row: row["status"] if "check" in row else "not checked",
    ),
    Column("error", "largest difference of out from the reference", _of_out("error")),
    Column(
        "plain error",
        "the same of the plain dense computation in the precision of q",
        _of_out("plain_error"),
    ),
    Column("of budget", "worst of out and lse, in parts of the error that the data allow", _used),
    Column("query rows", "that were compared, of all", _checked),
)


def _has_perplexity(row: dict[str, Any]) -> bool:
    return "perplexity" in row


def _fine(value: float | None) -> str:
    """A perplexity: a hundredth of it is much."""
    return NOTHING if value is None else f"{value:,.2f}"


def _perplexity(row: dict[str, Any]) -> str:
    return _fine(row["perplexity"]["value"]) if _has_perplexity(row) else NOTHING


def _own_perplexity(dense: dict[str, Any]) -> str:
    return _fine(dense.get("perplexity"))


def _of_dense(row: dict[str, Any]) -> str:
    own = row["dense"].get("perplexity")
    value = row["perplexity"]["value"] if _has_perplexity(row) else None
    return _times(value / own) if value and own else NOTHING


def _in_model(which: str) -> Callable[[dict[str, Any]], str]:
    """Pairs of all layers, in parts of the baseline's in as many."""

    def entry(row: dict[str, Any]) -> str:
        if not _has_perplexity(row):
            return NOTHING
        found = row["perplexity"]
        return _share(found[which] / (found["layers"] * row["dense"]["pairs"]))

    return entry


def _model_inflation(row: dict[str, Any]) -> str:
    found = row.get("perplexity", {})
    logical = found.get("logical_pairs")
    return number(found["physical_pairs"] / logical) if logical else NOTHING


KEEPS = (
    Column(
        "perplexity",
        "of the model with the row's attention in all layers; of the baseline, as it is",
        _perplexity,
        _own_perplexity,
        _has_perplexity,
    ),
    Column(
        "mass kept",
        "the baseline's softmax mass on the row's pairs, mean over batch, heads and queries",
        lambda row: _share(row["mass_kept"]),
        lambda dense: _share(1.0),
    ),
    Column(
        "output error",
        "relative distance to the baseline's output, Frobenius norm",
        lambda row: number(row["output_error"]),
        lambda dense: "0",
    ),
    Column(
        "pairs",
        "logical pairs, in parts of the baseline's",
        lambda row: _share(row["budget"]["of_dense"]),
        lambda dense: _share(1.0),
    ),
    Column(
        "outside",
        "of the row's pairs, those that the baseline does not see",
        lambda row: _share(
            row["pairs_outside"] / row["budget"]["logical_pairs"] if row["pairs_outside"] else 0.0
        ),
        lambda dense: _share(0.0),
        lambda row: bool(row["pairs_outside"]),
    ),
    Column(
        "physical",
        "physical pairs, in parts of the baseline's logical ones",
        lambda row: _share(
            row["budget"]["physical_pairs"] / row["dense"]["pairs"]
            if row["dense"]["pairs"]
            else None
        ),
    ),
    Column(
        "inflation",
        "physical pairs for each logical pair",
        lambda row: number(row["budget"]["inflation"]),
    ),
    Column(
        "delivered",
        "of the promised speedup, what arrived",
        lambda row: number(row["delivered"]),
        lambda dense: "1",
    ),
)

MODEL = (
    Column(
        "perplexity",
        "exp of the mean loss of each token, from those before it",
        _perplexity,
        _own_perplexity,
        _has_perplexity,
    ),
    Column(
        "of dense",
        "beside the model as it is",
        _of_dense,
        lambda dense: _times(1.0) if "perplexity" in dense else NOTHING,
        _has_perplexity,
    ),
    Column(
        "pairs",
        "logical pairs of all layers, in parts of the baseline's",
        _in_model("logical_pairs"),
        lambda dense: _share(1.0),
        _has_perplexity,
    ),
    Column(
        "physical",
        "physical pairs of all layers, in parts of the baseline's logical ones",
        _in_model("physical_pairs"),
        told=_has_perplexity,
    ),
    Column(
        "inflation",
        "physical pairs of all layers for each logical pair",
        _model_inflation,
        told=_has_perplexity,
    ),
)

COSTS = (
    Column("index", "the selector", _ms("index")),
    Column("layout", "rule and selection to tiles", _ms("layout")),
    Column("movement", "tensors copied for the kernel", _ms("movement")),
    Column("kernel", "attention itself", _ms("kernel"), lambda dense: number(dense["ms"])),
    Column(
        "total",
        "all stages; medians, so not quite their sum",
        _ms("total"),
        lambda dense: number(dense["ms"]),
    ),
    Column(
        "first call",
        "before anything was warm, compiling and deciding included",
        lambda row: number(row["first_ms"]),
    ),
)

DELIVERED = (
    Column(
        "promised",
        "how many times fewer pairs than the baseline",
        lambda row: _times(row["promised"]),
        lambda dense: _times(1.0),
    ),
    Column(
        "got",
        "how many times less time than the baseline took",
        lambda row: _times(row["got"]),
        lambda dense: _times(1.0),
    ),
    Column(
        "delivered",
        "got / promised: 1 where every skipped pair was skipped time",
        lambda row: number(row["delivered"]),
        lambda dense: "1",
    ),
    Column(
        "= selector", "logical / physical pairs", lambda row: number(row["factors"]["selector"])
    ),
    Column("x worktable", "kernel / total time", lambda row: number(row["factors"]["worktable"])),
    Column(
        "x kernel",
        "physical pairs a second, in parts of the baseline's",
        lambda row: number(row["factors"]["kernel"]),
    ),
)

TABLES = (
    ("Is it right?", CHECKS),
    ("What each row keeps, and at what cost", KEEPS),
    ("In all layers of the model", MODEL),
    ("Where the time goes, in ms", COSTS),
    ("What was delivered", DELIVERED),
)
