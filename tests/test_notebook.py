"""What a notebook shows: well-formed, escaped, true, and without reading what is not to be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import unescape
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flexsparse as fs
from flexsparse.masks import Causal, Document, SlidingWindow
from flexsparse.masks.softcap import Softcap
from flexsparse.viz import notebook, svg
from flexsparse.viz.palette import LIGHT
from flexsparse.viz.source import source

SVG = "{http://www.w3.org/2000/svg}"


def page(shown: Any) -> ElementTree.Element:
    """Its HTML, parsed; nothing in it comes from elsewhere."""
    text = shown._repr_html_()
    root = ElementTree.fromstring(text)
    for word in ("<script", "<link", "<img", "@import", "url(", "href", "src="):
        assert word not in text
    return root


def words(root: ElementTree.Element) -> str:
    return " ".join(" ".join(root.itertext()).split())


def selection(length: int = 64, keep: int = 3, block: int = 8) -> fs.Selection:
    draw = torch.Generator().manual_seed(0)
    rows = -(-length // block)
    indices = torch.randint(-1, rows, (1, 2, rows, keep), generator=draw)
    return fs.Selection.from_indices(
        indices, q_len=length, kv_len=length, q_block=block, kv_block=block
    )


def plan() -> fs.Plan:
    q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    return fs.make_plan(q, k, v, rule=Causal(), select=selection(), tile=16)


def everything() -> dict[str, Any]:
    made = plan()
    assert made.first is not None
    q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    return {
        "rule": Causal() & ~SlidingWindow(4),
        "function": fs.MaskRule.of(lambda b, h, q, kv: q > kv),
        "score": Softcap(20.0) >> Softcap(30.0),
        "selection": selection(),
        "layout": made.first,
        "plan": made,
        "budget": made.first.budget(),
        "report": fs.check(q, k, v, rule=Causal()),
    }


@pytest.mark.parametrize("name", everything())
def test_each_has_html_and_one_line_of_text(name: str) -> None:
    shown = everything()[name]
    root = page(shown)
    assert root.tag == "div" and root.find("b") is not None
    assert "\n" not in repr(shown) and len(repr(shown)) < 600 and str(shown)
    has = root.find(f"{SVG}svg") is not None
    assert has is (name in ("rule", "function", "selection", "layout"))


def test_what_is_said_is_so() -> None:
    made = plan()
    assert made.first is not None
    budget = made.first.budget()
    told = words(page(budget))
    for number in (budget.logical_pairs, budget.physical_tiles, budget.kv_bytes):
        assert f"{number:,}" in told
    assert f"rule {made.rule}" in words(page(made.first)) and "rule rule" not in words(
        page(made.first)
    )
    assert all(reason in words(page(made)) for reason in made.reasons)
    report = everything()["report"]
    told = words(page(report))
    for difference in report.differences:
        assert f"{difference.name} {difference.error:.2e}" in told
    assert "64 query rows of decode: ok" in told
    assert "at most 3 of 8 blocks of 8 keys for each 8 queries" in words(page(selection()))


def area(root: ElementTree.Element, colour: str) -> int:
    rects = [r for r in root.iter(f"{SVG}rect") if r.get("fill") == colour]
    return sum(int(r.get("width", 0)) * int(r.get("height", 0)) for r in rects)


def test_the_picture_has_every_pair() -> None:
    rule = Causal() & Document(torch.arange(48) // 20)
    raster = source(rule, 48).raster(48, 48)
    root = page(rule)
    full = raster.full_tiles * 16 * 16
    assert area(root, LIGHT.full) == full
    assert area(root, LIGHT.seen) == raster.pairs - full
    assert area(root, LIGHT.hidden) == raster.partial_tiles * 16 * 16 - (raster.pairs - full)
    assert f"{raster.pairs} pairs seen" in words(root)


def test_candidates_are_outlined_and_tiles_ruled() -> None:
    select = selection()
    made = source(select, h=1)
    root = ElementTree.fromstring(svg.draw(made, made.raster(64, 64)))
    paths = {p.get("stroke"): p.get("d", "") for p in root.iter(f"{SVG}path")}
    assert paths[LIGHT.candidate].count("Z") == int((select.indices[0, 1] >= 0).sum())
    assert paths[LIGHT.line].count("M") == 6


@dataclass(frozen=True, eq=False)
class Named(fs.MaskRule):
    name: str = field(default="</b><script>alert('&')</script>", metadata={"static": True})

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx


def test_the_users_text_is_escaped() -> None:
    rule = Named()
    text = rule._repr_html_()
    assert "<script" not in text and repr(rule) in unescape(text)
    assert words(page(rule)).startswith("Named(name=")
    q, k, v = torch.randn(3, 1, 1, 20, 16)
    assert "<script" not in fs.make_plan(q, k, v, rule=rule)._repr_html_()
    assert notebook.html("<b>") == "<pre>&#x27;&lt;b&gt;&#x27;</pre>"


def test_a_repr_never_prints_a_tensor() -> None:
    ids = torch.arange(10_000) // 70
    assert repr(Document(ids)) == "Document(document_of=int64[10000])"
    assert repr(Causal() & Document(ids)) == "Causal() & Document(document_of=int64[10000])"
    assert repr(Softcap(2.0)) == "Softcap(cap=2.0)"


class Own(fs.MaskRule):
    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def __repr__(self) -> str:
        return "mine"


class Child(Own):
    pass


def test_a_repr_of_the_users_own_stays() -> None:
    assert repr(Own()) == repr(Child()) == "mine"


def test_one_token_and_no_candidates() -> None:
    none = fs.Selection.from_indices(torch.zeros(1, 1, 1, 0, dtype=torch.int64), q_len=1, kv_len=1)
    layout = fs.build_layout(rule=Causal(), select=none, grid=fs.Grid(1, 1), heads=(1, 1))
    q, k, v = torch.randn(3, 1, 1, 1, 16)
    for shown in (none, layout, layout.budget(), fs.make_plan(q, k, v, select=none)):
        assert "nan" not in words(page(shown))
    assert "0 pairs seen (0.0%), 0 full and 0 partial tiles" in words(page(layout))
    assert "0 pairs seen" in words(page(fs.MaskRule.of(lambda b, h, q, kv: q < -kv - 1)))


def test_a_rule_that_is_right_for_its_own_lengths_alone() -> None:
    told = words(page(Document(torch.zeros(8, dtype=torch.int64))))
    assert "reads document_of int64[8] at index 47 of axis 0" in told


def test_nothing_is_read_of_tensors_elsewhere() -> None:
    made = plan()
    assert made.first is not None
    meta = [selection().to("meta"), made.first.to("meta")]
    for shown in meta:
        assert "not drawn: its tensors are not to be read here" in words(page(shown))
        assert repr(shown)
    large = fs.Selection.from_indices(
        torch.zeros(1, 1, 1025, 1024, dtype=torch.int32), q_len=1025, kv_len=1025
    )
    assert "not drawn" in words(page(large))
    long = fs.Selection.from_indices(
        torch.zeros(1, 1, 5000, 1, dtype=torch.int32), q_len=5000, kv_len=5000
    )
    assert "too long to draw here" in words(page(long))


def test_nothing_is_drawn_where_tensors_are_fake() -> None:
    rule = Causal()
    with FakeTensorMode() as mode:
        assert "not drawn" in words(page(rule))
        fake = mode.from_tensor(torch.zeros(1, 1, 4, 2, dtype=torch.int32))
        select = fs.Selection.from_indices(fake, q_len=4, kv_len=4, out_of_range="drop")
        assert repr(select)
    assert "not drawn" in words(page(select))
    assert "not drawn" not in words(page(rule))


def test_drawing_ignores_the_modes_of_its_surroundings() -> None:
    with torch.device("meta"), torch.inference_mode():
        assert "1,176 pairs" in words(page(Causal()))
    rule = Causal() & Document(torch.zeros(64, dtype=torch.int64))
    before = torch.get_rng_state()
    page(rule)
    assert torch.equal(before, torch.get_rng_state())
