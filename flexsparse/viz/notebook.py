"""What a notebook shows of each object: a table, and a picture where one can be drawn at once.

Nothing is read from an accelerator, and of a large tensor only its shape: showing a thing neither
waits nor moves memory. A new kind of object gets an entry here, and `flexsparse.shown.Shown` as a base.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch
from html import escape

import torch
from torch import Tensor

from flexsparse import telling
from flexsparse.budget import Budget
from flexsparse.checking import Report
from flexsparse.errors import FlexSparseError
from flexsparse.layout import Layout
from flexsparse.parameters import describe, held
from flexsparse.plan import Plan
from flexsparse.rules import MaskRule
from flexsparse.scores import ScoreRule
from flexsparse.selection import Selection
from flexsparse.viz import svg, words
from flexsparse.viz.palette import LIGHT
from flexsparse.viz.raster import Raster
from flexsparse.viz.source import Showable, source

# A rule is shown on this many tokens; a selection or a layout no longer, and no larger, than this.
_TOKENS = 48
_LONGEST = 4096
_LARGEST = 2**20

Rows = Iterable[tuple[str, object]]


@singledispatch
def html(shown: object) -> str:
    """HTML of an object; text where there is nothing more to say."""
    return f"<pre>{escape(repr(shown))}</pre>"


@html.register
def _rule(rule: MaskRule) -> str:
    picture, why = _drawn(rule, _tensors(rule), _TOKENS)
    return _page(describe(rule), [("mask rule", why)] if why else [], picture)


@html.register
def _score(score: ScoreRule) -> str:
    rows = [(f"tensor {i}", describe(x)) for i, x in enumerate(_tensors(score))]
    return _page(describe(score), [("score rule", "changes scores, hides nothing"), *rows])


@html.register
def _selection(select: Selection) -> str:
    b, h, r, k = select.shape
    rows: Rows = [
        ("indices", f"[{b}, {h}, {r}, {k}] {_device(select.indices)}"),
        ("lengths", f"{select.q_len} queries, {select.kv_len} keys"),
        ("picture", "sequence 0, head 0, every pair of a candidate"),
    ]
    short = max(select.q_len, select.kv_len) <= _LONGEST
    picture, why = _drawn(select, [select.indices]) if short else ("", "too long to draw here")
    return _page(f"Selection: {telling.selected(select)}", _with(rows, why), picture)


@html.register
def _layout(layout: Layout) -> str:
    q, kv = layout.block_size
    b, h, r, c = layout.kv_indices.shape
    rows: Rows = [
        ("tiles", f"{r} x {c} of {q}x{kv}"),
        ("lists", f"{b} sequences, {h} heads, {_device(layout.kv_indices)}"),
        ("address", layout.address),
        ("rule", layout.program.rule.name.removeprefix("rule ") if layout.program.rule else "none"),
        ("selection", telling.selected(layout.select)),
        ("picture", "sequence 0, head 0"),
    ]
    short = max(layout.grid.q_len, layout.grid.kv_len) <= _LONGEST
    tensors = [*layout.lists, *layout.tables]
    picture, why = _drawn(layout, tensors) if short else ("", "too long to draw here")
    return _page(repr(layout.grid), _with(rows, why), picture)


@html.register
def _plan(plan: Plan) -> str:
    heads, kv_heads, head_dim, v_head_dim = plan.shape
    rows = [
        ("grid", plan.grid),
        ("heads", f"{heads} query, {kv_heads} KV, of {head_dim} and {v_head_dim}"),
        ("tensors", f"{str(plan.dtype).removeprefix('torch.')} on {plan.device}"),
        *telling.rows(plan),
    ]
    return _page("Plan", rows)


@html.register
def _budget(budget: Budget) -> str:
    lines = [line.split(maxsplit=1) for line in str(budget).splitlines()]
    named = [(word, rest) for word, rest in lines if word != "if"]
    shared = [("if lists", rest) for word, rest in lines if word == "if"]
    widest = max(budget.dense_pairs, budget.physical_pairs, 1)
    bars = [
        _bar("asked for", budget.logical_pairs / widest, LIGHT.full),
        _bar("computed", budget.physical_pairs / widest, LIGHT.seen),
        _bar("dense", budget.dense_pairs / widest, LIGHT.line),
    ]
    return _page("Budget", [*named, *shared], f"<table>{''.join(bars)}</table>")


@html.register
def _report(report: Report) -> str:
    head = "".join(_cell("th", t) for t in ("", "error", "plain", "budget", "worst at", ""))
    body = "".join(
        "<tr>"
        + _cell("th", d.name)
        + "".join(_cell("td", f"{x:.2e}") for x in (d.error, d.plain_error, d.budget))
        + _cell("td", list(d.worst))
        + _cell("td", "ok" if d.ok else "too large")
        + "</tr>"
        for d in report.differences
    )
    said = "ok" if report.ok else f"first difference: {report.stage}; {report.detail}"
    title = f"{report.rows} query rows of {report.plan.backend}: {said}"
    remark: Rows = [("empty", report.remark)] if report.remark else []
    return _page(title, remark, f"<table><tr>{head}</tr>{body}</table>")


def _drawn(shown: Showable, tensors: list[Tensor], q_len: int | None = None) -> tuple[str, str]:
    """The picture with its counts, or nothing and why."""
    unreadable = [x for x in tensors if not _readable(x)]
    if unreadable or not _plain_world():
        return "", "not drawn: its tensors are not to be read here"
    try:
        made = source(shown, q_len)
        raster = made.raster(svg.CELLS, svg.CELLS)
        return f"{svg.draw(made, raster)}{_caption(raster)}", ""
    except (FlexSparseError, RuntimeError, IndexError) as error:
        # A rule may be right for its own lengths alone, such as with a table of 16 entries.
        return "", f"not drawn: {error}"


def _caption(raster: Raster) -> str:
    text = f"{words.lengths(raster)}; {words.counts(raster)}; {words.scale(raster, 'cell')}"
    keys = ((words.FULL, LIGHT.full), (words.SEEN, LIGHT.seen), (words.HIDDEN, LIGHT.hidden))
    legend = " ".join(
        f'<span style="color:{colour}">&#9632;</span> {escape(name)}' for name, colour in keys
    )
    return f'<div style="font-size:smaller;max-width:30em">{escape(text)}<br/>{legend}</div>'


def _readable(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers here, few enough: no accelerator's, no fake, no traced one."""
    own = type(tensor) in (Tensor, torch.nn.Parameter)
    return own and tensor.device.type == "cpu" and tensor.numel() <= _LARGEST


def _plain_world() -> bool:
    """Whether what torch computes is computed: not while something traces or fakes it."""
    modes = torch._C._len_torch_dispatch_stack()
    return not (
        modes or torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack()
    )


def _tensors(rule: MaskRule | ScoreRule) -> list[Tensor]:
    """Every tensor that a rule holds, by whatever path."""
    kept: list[object] = []
    held(rule, kept)
    return [x for x in kept if isinstance(x, Tensor)]


def _device(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _with(rows: Rows, why: str) -> list[tuple[str, object]]:
    """The reason in the place of the picture."""
    return [(name, why if name == "picture" and why else said) for name, said in rows]


def _page(title: str, rows: Rows, inner: str = "") -> str:
    table = "".join(
        "<tr>" + _cell("th", name) + _cell("td", value) + "</tr>" for name, value in rows
    )
    table = f"<table>{table}</table>" if table else ""
    return f"<div><b>{escape(title)}</b>{table}{inner}</div>"


def _cell(tag: str, value: object) -> str:
    return f'<{tag} style="text-align:left">{escape(str(value))}</{tag}>'


def _bar(name: str, share: float, colour: str) -> str:
    bar = f'<div style="width:{200 * share:.1f}px;height:0.8em;background:{colour}"></div>'
    return f"<tr>{_cell('th', name)}<td>{bar}</td></tr>"
