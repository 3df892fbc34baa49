"""``flexsparse show``: a rule, a selector or the rows of a configuration as pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexsparse.errors import ArgumentError, ConfigError, FlexSparseError

if TYPE_CHECKING:
    import torch

    from flexsparse.experiment.config import Input
    from flexsparse.experiment.load import Case, Experiment
    from flexsparse.experiment.model import QKV
    from flexsparse.viz.source import Source

FORMATS = (".png", ".svg", ".pdf")
# A selector scores real queries and keys, and asks the rule about every pair of them.
_SELECTED_PAIRS = 2**28


def show(
    name: Annotated[str, typer.Argument(metavar="RULE|CONFIG.yaml")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="How many queries, by default 64.", show_default=False)
    ] = None,
    keys: Annotated[
        int | None,
        typer.Option(min=1, help="How many keys, by default as many.", show_default=False),
    ] = None,
    tile: Annotated[
        int | None,
        typer.Option(
            help="Tile size of a rule or selector, by default 16, or 128 past 512 tokens.",
            show_default=False,
        ),
    ] = None,
    head: Annotated[int, typer.Option(min=0, help="The query head that is shown.")] = 0,
    row: Annotated[
        str | None, typer.Option(help="The one row of a configuration.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A .png, .svg or .pdf to write instead.", show_default=False
        ),
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="On dark paper, with --out.")] = False,
) -> int:
    """Show which pairs a rule or selector sees, and which tiles compute them.

    RULE is a gallery name, my_lab.rules:Name, ./file.py:Name, a rule as configurations write it,
    '{and: [causal, {sliding_window: {size: 128}}]}', or a configuration, whose rows are shown on
    its own inputs, in the tiles that `run` takes here. Selectors are shown on random queries and
    keys under a causal rule.
    """
    if out is not None and out.suffix not in FORMATS:
        raise ConfigError(f"--out must end in {', '.join(FORMATS)}, got {out}")
    if Path(name).suffix in (".yaml", ".yml"):
        lengths = {"--tokens": tokens, "--keys": keys}
        if given := [option for option, value in lengths.items() if value is not None]:
            raise ConfigError(f"{name} gives the lengths, as its input: leave out {given[0]}")
        if tile is not None:
            raise ConfigError(
                f"the rows of {name} are shown with the tiles that `run` takes: leave out --tile, or set "
                f"that of a row, rows.0.tile={tile}"
            )
        sources = _rows(name, arguments or [], row, head)
    elif row is not None:
        raise ConfigError(f"--row names a row of a configuration, CONFIG.yaml; {name} has none")
    else:
        q_len = 64 if tokens is None else tokens
        shown = _one(name, arguments or [], q_len, q_len if keys is None else keys, tile, head)
        sources = {name: shown}
    if out is None:
        _print(sources)
    else:
        _save(sources, out, dark)
    return 0


def _one(
    name: str, arguments: list[str], q_len: int, kv_len: int, tile: int | None, head: int
) -> Source:
    import torch

    from flexsparse.experiment.config import Input, RandomInput
    from flexsparse.experiment.named import named
    from flexsparse.grid import Grid
    from flexsparse.masks.causal import Causal
    from flexsparse.resolve import kind_of
    from flexsparse.viz.source import source

    try:
        made = named(name, arguments)
    except ConfigError as error:
        hint = ", or a configuration, CONFIG.yaml" if str(error).startswith("no rule") else ""
        raise ConfigError(f"{error}{hint}") from None
    kind = kind_of(made)
    if kind == "rule":
        return source(made, q_len, kv_len, tile=tile, h=head)
    if kind != "selector":
        what = "a score, which hides nothing" if kind == "score" else f"a {type(made).__name__}"
        raise ArgumentError(f"show draws rules, selectors and configurations; {name} is {what}")
    _refuse_long(q_len, kv_len)
    heads = head + 1
    shape = RandomInput(heads=heads, q_len=q_len, kv_len=kv_len, head_dim=64)
    q, k, _ = _inputs(Input(random=shape), torch.float32, torch.device("cpu"), 0)
    select = made.select(q, k, Grid(q_len, kv_len), Causal())
    return source(Causal(), q_len, kv_len, select=select, tile=tile, h=head, heads=heads)


def _rows(file: str, overrides: list[str], row: str | None, head: int) -> dict[str, Source]:
    from flexsparse.experiment.load import load
    from flexsparse.resolve import did_you_mean

    experiment = load(file, overrides)
    cases = [case for case in experiment.cases if row in (None, case.row.name)]
    if not cases:
        names = [case.row.name for case in experiment.cases]
        raise ConfigError(
            f"{file} has no row {row!r}{did_you_mean(row or '', names)}; it has {', '.join(names)}"
        )
    return {case.row.name: _case(case, experiment, head) for case in cases}


def _case(case: Case, experiment: Experiment, head: int) -> Source:
    """A row on the inputs of its configuration, in the tiles of the plan that a run makes here."""
    import torch

    from flexsparse.experiment.config import as_fallback, as_tile
    from flexsparse.parameters import moved
    from flexsparse.planning import make_plan
    from flexsparse.viz.source import source

    config, row = experiment.config, case.row
    cuda = config.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    rule, select, score = (moved(x, device) for x in (case.rule, case.select, case.score))
    try:
        q, k, v = _tensors(case, experiment, device)
        # What is drawn has rows in their own order.
        plan = make_plan(
            q, k, v, rule=rule, select=select, score=score, q_offset=row.q_offset,
            fallback=as_fallback(row.fallback), backend=row.backend, pack=row.pack,
            tile=as_tile(row.tile), split=row.split, cluster=False,
        )  # fmt: skip
    except FlexSparseError as error:
        raise ConfigError(f"row {row.name!r}: {error}") from None
    if head >= plan.shape[0]:
        raise ArgumentError(f"--head must be one of 0 to {plan.shape[0] - 1}, got {head}")
    shown = source(plan, h=head)
    if config.device == "cuda" and not cuda:
        return replace(shown, title=f"{shown.title}; tiles of a CPU, for want of CUDA")
    return shown


def _tensors(case: Case, experiment: Experiment, device: torch.device) -> QKV:
    """What the plan is made for; of a rule alone lengths count, and no numbers are drawn."""
    import torch

    config = experiment.config
    dtype, shape = getattr(torch, config.dtype), config.input.random
    if shape is None:
        q, k, v = _inputs(config.input, dtype, device, config.seed, experiment.source.folder)
    elif case.select is None:
        keys = (shape.batch, shape.kv_heads or shape.heads, shape.kv_len or shape.q_len)
        q = torch.empty(
            shape.batch, shape.heads, shape.q_len, shape.head_dim, dtype=dtype, device=device
        )
        k = v = torch.empty(*keys, shape.head_dim, dtype=dtype, device=device)
    else:
        _refuse_long(shape.q_len, shape.kv_len or shape.q_len)
        q, k, v = _inputs(config.input, dtype, device, config.seed)
    if case.select is not None:
        _refuse_long(q.shape[2], k.shape[2])
    return q, k, v


def _refuse_long(q_len: int, kv_len: int) -> None:
    if q_len * kv_len > _SELECTED_PAIRS:
        raise ArgumentError(
            f"a selector is shown on at most {_SELECTED_PAIRS:,} pairs, which it scores, got "
            f"{q_len:,} x {kv_len:,}: flexsparse.plot shows a Selection of any length"
        )


def _inputs(
    given: Input, dtype: torch.dtype, device: torch.device, seed: int, beside: Path = Path()
) -> QKV:
    from flexsparse.experiment.inputs import load_inputs

    return load_inputs(given, dtype, device, seed, beside)


def _print(sources: dict[str, Source]) -> None:
    from flexsparse.verbs import terminal
    from flexsparse.viz.terminal import draw

    width, style = terminal.width(), terminal.style()
    pictures = [draw(source, width, style) for source in sources.values()]
    if len(sources) > 1:
        pictures = [f"{name}: {p}" for name, p in zip(sources, pictures, strict=True)]
    typer.echo("\n\n".join(pictures))


def _save(sources: dict[str, Source], out: Path, dark: bool) -> None:
    from flexsparse.viz.plotting import plot_all

    figure = plot_all(list(sources.values()), list(sources), dark)
    try:
        figure.savefig(out, dpi=160)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    typer.echo(str(out))
