"""Pictures say what is so: shares and counts beside brute force, at sizes where that exists."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import matplotlib
import pytest
import torch
from torch import Tensor

import flexsparse as fs
from flexsparse.errors import ArgumentError, BackendError, FlexSparseError
from flexsparse.masks import Causal, Document, SlidingWindow
from flexsparse.masks.attention_sink import AttentionSink
from flexsparse.reference import allowed
from flexsparse.viz import asking, palette, plotting, words
from flexsparse.viz.axis import Axis
from flexsparse.viz.raster import Raster
from flexsparse.viz.source import Source, source
from flexsparse.viz.terminal import Style, draw

matplotlib.use("agg")
ANSI = re.compile(r"\x1b\[[\d;]*m")


def documents(length: int, count: int = 5) -> Tensor:
    draw = torch.Generator().manual_seed(length)
    ends = torch.randint(0, length, (count,), generator=draw).sort().values
    return torch.bucketize(torch.arange(length), ends)


def rules(length: int) -> dict[str, fs.MaskRule]:
    return {
        "causal": Causal(),
        "sinks": Causal() & (SlidingWindow(max(1, length // 9)) | AttentionSink(3)),
        "documents": Causal() & Document(documents(length)),
        "every seventh": fs.MaskRule.of(lambda b, h, q, kv: kv % 7 == 0),
        "nothing": fs.MaskRule.of(lambda b, h, q, kv: q < -(2**20)),
    }


def chosen(q_len: int, kv_len: int, keep: int, q_block: int = 1, kv_block: int = 1) -> fs.Selection:
    draw = torch.Generator().manual_seed(q_len + kv_len)
    shape = (1, 1, -(-q_len // q_block), keep)
    indices = torch.randint(-1, -(-kv_len // kv_block), shape, generator=draw)
    return fs.Selection.from_indices(
        indices, q_len=q_len, kv_len=kv_len, q_block=q_block, kv_block=kv_block
    )


def by_cell(pairs: Tensor, q: Axis, kv: Axis) -> Tensor:
    """The mean of each cell, counted one cell at a time."""
    return torch.tensor(
        [
            [
                float(pairs[i : i + q.cell, j : j + kv.cell].double().mean())
                for j in range(0, kv.length, kv.cell)
            ]
            for i in range(0, q.length, q.cell)
        ],
        dtype=torch.float64,
    )


def truth(rule: Any, select: Any, q_len: int, kv_len: int, q_offset: Any = None) -> Tensor:
    grid = fs.Grid(q_len, kv_len, q_offset=q_offset)
    return allowed(grid, 1, rule=rule, select=select, rows=torch.arange(q_len)).expand(
        1, 1, q_len, kv_len
    )[0, 0]


def spread(tiles: Tensor, tile: tuple[int, int], q_len: int, kv_len: int) -> Tensor:
    pairs = tiles.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
    return pairs[:q_len, :kv_len]


def agrees(raster: Raster, rule: Any, select: Any, q_offset: Any = None) -> None:
    """Shares beside brute force; tiles and counts beside the layout's own."""
    q_len, kv_len, tile = raster.q.length, raster.kv.length, (raster.q.tile, raster.kv.tile)
    pairs = truth(rule, select, q_len, kv_len, q_offset)
    layout = fs.build_layout(
        rule=rule, select=select, grid=fs.Grid(q_len, kv_len, q_offset=q_offset), heads=(1, 1),
        block_size=tile,
    )  # fmt: skip
    partial, full = (spread(m[0, 0], tile, q_len, kv_len) for m in layout.tile_maps())
    for share, of in ((raster.seen, pairs), (raster.full, full), (raster.partial, partial)):
        torch.testing.assert_close(share, by_cell(of, raster.q, raster.kv))
    budget = layout.budget()
    assert (raster.pairs, raster.full_tiles, raster.partial_tiles) == (
        budget.logical_pairs,
        budget.full_tiles,
        budget.partial_tiles,
    )
    assert raster.inflation == pytest.approx(budget.inflation, nan_ok=True)
    assert raster.exact


@pytest.mark.parametrize("name", rules(9))
@pytest.mark.parametrize(
    ("q_len", "kv_len", "cells", "tile"),
    [(1, 1, 8, 16), (65, 65, 80, 16), (130, 130, 20, 16), (100, 200, 33, (32, 16)),
     (200, 200, 7, 48), (3, 150, 40, 16)],
)  # fmt: skip
def test_a_raster_is_brute_force(name: str, q_len: int, kv_len: int, cells: int, tile: Any) -> None:
    rule = rules(kv_len)[name]
    agrees(source(rule, q_len, kv_len, tile=tile).raster(cells, cells), rule, None)


@pytest.mark.parametrize("blocks", [(1, 1), (16, 32), (24, 8)])
@pytest.mark.parametrize("rule", [None, Causal()])
@pytest.mark.parametrize("cells", [200, 21])
def test_a_selection_under_a_rule_is_brute_force(blocks: Any, rule: Any, cells: int) -> None:
    select = chosen(150, 170, 5, *blocks)
    made = source(select if rule is None else rule, select=None if rule is None else select)
    agrees(made.raster(cells, cells), rule, select)


def test_offsets_move_the_queries() -> None:
    agrees(source(Causal(), 40, 100, q_offset=7).raster(50, 50), Causal(), None, 7)
    per = torch.tensor([3, 20])
    one, other = (source(Causal(), 40, 100, q_offset=per, b=b) for b in (0, 1))
    assert (one.q_offset, other.q_offset) == (3, 20)
    agrees(other.raster(50, 50), Causal(), None, 20)


def test_a_layout_and_a_plan_are_shown_as_they_are() -> None:
    """Folded heads, a list per KV head, a fallback: head by head."""
    q = torch.randn(2, 4, 70, 16)
    k, v = torch.randn(2, 2, 2, 70, 16)
    indices = torch.randint(-1, 5, (2, 2, 5, 2), generator=torch.Generator().manual_seed(0))
    indices[:, :, 3] = -1
    select = fs.Selection.from_indices(indices, q_len=70, kv_len=70, q_block=16, kv_block=16)
    plan = fs.make_plan(q, k, v, rule=Causal(), select=select, fallback="self", tile=16)
    assert "folded" in str(plan) and plan.first is not None
    dense = plan.first.dense()
    for b in range(2):
        for h in range(4):
            raster = source(plan, b=b, h=h).raster(80, 80)
            torch.testing.assert_close(raster.seen, dense[b, h].double())
            assert raster.pairs == int(dense[b, h].sum())
    both = source(plan.first, b=1, h=3)
    assert both.title.endswith("sequence 1, head 3")


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "EXACT_PAIRS", 0)


@pytest.mark.usefixtures("sampling")
@pytest.mark.parametrize("name", rules(9))
@pytest.mark.parametrize("tile", [16, 64])
def test_samples_are_near_the_truth(name: str, tile: int) -> None:
    length = 500
    rule = rules(length)[name]
    raster = source(rule, length, tile=tile).raster(32, 32)
    pairs = truth(rule, None, length, length)
    assert not raster.exact
    error = raster.seen - by_cell(pairs, raster.q, raster.kv)
    assert error.abs().mean() < 0.09 and abs(float(error.mean())) < 0.02
    layout = fs.build_layout(
        rule=rule, grid=fs.Grid(length, length), heads=(1, 1), block_size=(tile, tile)
    )
    # What is thinner than the gaps between the pairs asked can hide there; edges cannot.
    if name in ("causal", "sinks", "nothing"):
        partial, full = (spread(m[0, 0], (tile, tile), length, length) for m in layout.tile_maps())
        torch.testing.assert_close(raster.full, by_cell(full, raster.q, raster.kv))
        torch.testing.assert_close(raster.partial, by_cell(partial, raster.q, raster.kv))


@pytest.mark.usefixtures("sampling")
@pytest.mark.parametrize("rule", [None, Causal()])
@pytest.mark.parametrize("cells", [200, 21, 6])
def test_each_pair_of_token_candidates_is_asked_at_any_length(rule: Any, cells: int) -> None:
    select = chosen(150, 170, 5)
    made = source(select if rule is None else rule, select=None if rule is None else select)
    agrees(made.raster(cells, cells), rule, select)


@pytest.mark.usefixtures("sampling")
def test_block_candidates_are_sampled_within_themselves() -> None:
    select = chosen(256, 256, 3, 16, 16)
    raster = source(select).raster(32, 32)
    pairs = truth(None, select, 256, 256)
    torch.testing.assert_close(raster.seen, by_cell(pairs, raster.q, raster.kv))
    assert raster.pairs == int(pairs.sum()) and not raster.exact


@pytest.mark.usefixtures("sampling")
def test_too_many_candidates_are_sampled_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "CANDIDATE_PAIRS", 1000)
    select = chosen(512, 512, 20)
    raster = source(select).raster(16, 16)
    assert not raster.exact
    assert raster.pairs == pytest.approx(int(truth(None, select, 512, 512).sum()), rel=0.1)


@pytest.mark.usefixtures("sampling")
def test_a_layout_knows_its_tiles_where_pairs_are_sampled() -> None:
    rule = Causal() & Document(documents(500, 20))
    layout = fs.build_layout(rule=rule, grid=fs.Grid(500, 500), heads=(1, 1), block_size=(16, 16))
    raster = source(layout).raster(32, 32)
    budget = layout.budget()
    assert (raster.full_tiles, raster.partial_tiles) == (budget.full_tiles, budget.partial_tiles)
    partial = spread(layout.tile_maps()[0][0, 0], (16, 16), 500, 500)
    torch.testing.assert_close(raster.partial, by_cell(partial, raster.q, raster.kv))


class Asked:
    """A mask that counts what it is asked."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.total, self.most = inner, 0, 0

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        pairs: Tensor = self.inner(b, h, q, kv)
        self.total, self.most = self.total + pairs.numel(), max(self.most, pairs.numel())
        return pairs


@pytest.mark.parametrize(("length", "tile"), [(131072, 16), (2**20, 128)])
def test_what_is_asked_does_not_grow_with_the_length(length: int, tile: int) -> None:
    made = source(Causal(), length, tile=tile)
    asked = Asked(made.mask)
    raster = replace(made, mask=asked).raster(64, 64)
    assert asked.total < 2**26 and asked.most <= 2**21
    assert raster.pairs == pytest.approx(length * (length + 1) / 2, rel=0.02)
    tiles = length // tile
    assert raster.partial_tiles == pytest.approx(tiles, rel=0.3)
    assert raster.full_tiles == pytest.approx(tiles * (tiles - 1) / 2, rel=0.03)


def test_an_axis_cuts_cells_and_tiles_alike() -> None:
    for length in (1, 15, 64, 100, 4096, 131072):
        for tile in (16, 48, 128):
            for cells in (1, 7, 70, 512):
                axis = Axis.fitting(length, tile, cells, 1024)
                assert axis.cells <= cells
                assert axis.cell % tile == 0 or tile % axis.cell == 0
                if axis.whole:
                    assert int(axis.size.sum()) == length


STYLES: list[Style] = ["colour", "half", "ascii"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("length", "width"), [(n, w) for n in (1, 2, 65, 300) for w in (40, 80, 120)] + [(131072, 80)]
)
def test_terminal_pictures_fit(style: Style, width: int, length: int) -> None:
    made = source(rules(length)["sinks"] | Document(documents(length)), length)
    lines = ANSI.sub("", draw(made, width, style)).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 2 * width
    assert any("computed, not seen" in line for line in lines)
    scale = "one pair" if length <= width - 7 else "pairs"
    assert scale in " ".join(lines)


def test_half_blocks_are_the_pairs() -> None:
    rule = rules(65)["documents"]
    text = draw(source(rule, 65), 80, "half").splitlines()
    picture = [line[4:].ljust(65) for line in text if re.match(r"^ *\d* [ ·▀▄█]*$", line)]
    upper = [[sign in "█▀" for sign in line] for line in picture]
    lower = [[sign in "█▄" for sign in line] for line in picture]
    rows = [row for pair in zip(upper, lower, strict=True) for row in pair][:65]
    assert torch.equal(torch.tensor(rows), truth(rule, None, 65, 65))


def test_ascii_tells_the_tiles_apart() -> None:
    text = draw(source(Causal(), 40), 80, "ascii")
    rows = [line[4:].ljust(40) for line in text.splitlines() if re.match(r"^ *\d* [#*. ]*$", line)]
    layout = fs.build_layout(rule=Causal(), grid=fs.Grid(40, 40), heads=(1, 1), block_size=(16, 16))
    partial, full = (spread(m[0, 0], (16, 16), 40, 40) for m in layout.tile_maps())
    seen = truth(Causal(), None, 40, 40)
    for i, row in enumerate(rows):
        for j, sign in enumerate(row):
            wanted = "#" if full[i, j] else " " if not partial[i, j] else "*" if seen[i, j] else "."
            assert sign == wanted, (i, j)
    assert len(rows) == 40


def test_colours_are_two_cells_a_character() -> None:
    text = draw(source(Causal(), 33), 80, "colour")
    assert text.count("▀") == 33 * 17
    blue = ";".join(str(round(255 * float(x))) for x in palette.rgb(palette.LIGHT.full))
    assert f"\x1b[38;2;{blue}m" in text


@pytest.mark.parametrize("style", STYLES)
def test_candidates_that_the_rule_hides_are_marked(style: Style) -> None:
    select = chosen(40, 40, 2)
    text = draw(source(Causal(), select=select), 80, style)
    hidden = select.dense()[0, 0] & ~truth(Causal(), None, 40, 40)
    seen = truth(Causal(), select, 40, 40)
    assert words.WASTED in ANSI.sub("", text).replace("\n", " ")
    lines = [line for line in text.splitlines() if re.match(r"^ *\d* [ x·.*▀▄█]*$", line)]
    if style == "ascii":
        assert "".join(lines).count("x") == int(hidden.sum())
    elif style == "half":
        pairs = hidden.view(20, 2, 40).any(1) & ~seen.view(20, 2, 40).any(1)
        assert "".join(lines).count("x") == int(pairs.sum())
    assert words.WASTED not in draw(source(Causal(), 40), 80, style)


def test_words_count_one_head() -> None:
    select = chosen(64, 64, 4)
    raster = source(Causal(), select=select).raster(64, 64)
    assert f"{int(truth(Causal(), select, 64, 64).sum())} pairs seen" in words.counts(raster)
    assert words.scale(raster, "cell") == "a cell is one pair"
    assert "about" in words.counts(source(Causal(), 16384).raster(64, 64))


def image(figure: Any) -> Tensor:
    return torch.as_tensor(figure.axes[0].images[0].get_array())


def test_a_plot_is_the_raster_with_its_words() -> None:
    select = chosen(64, 64, 3, 4, 8)
    figure = fs.plot(Causal(), 64, select=select)
    made = source(Causal(), select=select)
    torch.testing.assert_close(image(figure), palette.colours(made.raster(512, 512), palette.LIGHT))
    axes = figure.axes[0]
    assert f"{made.raster(64, 64).pairs} pairs seen" in axes.get_title("left").replace("\n", " ")
    assert figure.get_suptitle() == "Causal(), at most 3 of 8 blocks of 8 keys for each 4 queries"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [words.FULL, words.SEEN, words.HIDDEN, words.SKIPPED, words.CANDIDATE]
    outlines = axes.collections[-1].get_paths()
    assert len(outlines) == int((select.indices >= 0).sum())
    ticks = axes.xaxis.get_major_formatter()
    assert [ticks(t, 0) for t in axes.get_xticks()][:2] == ["0", "8"]


@pytest.mark.parametrize("dark", [False, True])
def test_a_plot_renders(dark: bool) -> None:
    for made in (
        lambda: fs.plot(Causal(), 1, dark=dark),
        lambda: fs.plot(chosen(1, 1, 0), dark=dark),
        lambda: fs.plot(chosen(3000, 3000, 2, 300, 10), dark=dark),
        lambda: fs.plot(Causal(), 1, 4096, dark=dark),
        lambda: plotting.plot_all([source(Causal(), 20)] * 4, [*"abcd"], dark),
    ):
        file = io.BytesIO()
        made().savefig(file, format="svg")
        assert file.getvalue().count(b"<svg") == 1
    assert fs.plot(Causal(), 4)._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_a_plot_takes_somebodys_axes() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    assert fs.plot(Causal(), 32, ax=figure.add_subplot()) is figure
    assert "Causal()" in figure.axes[0].get_title("left")


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK])
def test_colours_differ_in_lightness(colours: palette.Palette) -> None:
    def light(colour: str) -> float:
        linear = palette.rgb(colour) ** 2.2
        return float(linear @ torch.tensor([0.2126, 0.7152, 0.0722], dtype=torch.float64)) + 0.05

    def contrast(a: str, b: str) -> float:
        return max(light(a), light(b)) / min(light(a), light(b))

    assert contrast(colours.ink, colours.paper) > 7
    assert contrast(colours.full, colours.paper) > 3
    assert contrast(colours.seen, colours.hidden) > 1.6
    assert contrast(colours.hidden, colours.paper) > 1.15


def test_matplotlib_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendError, match=re.escape("pip install 'flexsparse[plot]'")):
        fs.plot(Causal(), 16)


WRONG: dict[str, tuple[Any, str]] = {
    "no length": (lambda: source(Causal()), "a rule is shown with a length, such as plot(rule, 1024)"),
    "a class": (lambda: source(Causal, 8), "make one, such as Causal(...)"),
    "a tensor": (lambda: source(torch.ones(3), 8), "got a tensor"),  # type: ignore[arg-type]
    "a selector": (lambda: source(Causal(), 8, select=Causal()), "select must be a Selection"),  # type: ignore[arg-type]
    "lengths": (lambda: source(Causal(), 9, select=chosen(8, 8, 1)), "q_len"),
    "two selections": (
        lambda: source(chosen(8, 8, 1), select=chosen(8, 8, 1)), "show the Selection alone"
    ),
    "a head too many": (
        lambda: source(fs.Selection.from_indices(torch.zeros(1, 2, 4, 1, dtype=torch.int64), q_len=4, kv_len=4), h=2),
        "2 heads",
    ),
    "a bad head": (lambda: source(Causal(), 8, h=-1), "h must be an index of at least 0, got -1"),
    "a layout's length": (
        lambda: source(fs.build_layout(grid=fs.Grid(16, 16), heads=(1, 1)), 16), "show it alone"
    ),
    "a small tile": (lambda: source(Causal(), 8, tile=4), "tile must be at least 16"),
    "a short table": (lambda: source(Document(documents(8)), 16), "reads"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_shown_says_so(name: str) -> None:
    call, said = WRONG[name]
    with pytest.raises(FlexSparseError, match=re.escape(said)):
        call()


def test_a_plan_without_a_layout_says_so() -> None:
    plan = fs.make_plan(*torch.randn(3, 1, 1, 16, 16))
    with pytest.raises(ArgumentError, match="holds no layout"):
        source(replace(plan, first=None))


def test_sources_stay_of_one_kind() -> None:
    assert isinstance(source(None, 8), Source) and source(None, 8).title == "no rule"
    assert source(None, 8).raster(8, 8).pairs == 64


def test_memory_stays_bounded_at_long_lengths() -> None:
    code = (
        "import torch, resource, flexsparse as fs\nfrom flexsparse.masks import Causal\n"
        "fs.attention(*torch.randn(3, 1, 1, 16, 16))\n"
        "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = used()\nfs.plot(Causal(), 131072)\n"
        "tokens = torch.randint(0, 131072, (1, 1, 131072, 16), dtype=torch.int32)\n"
        "chosen = fs.Selection.from_indices(tokens, q_len=131072, kv_len=131072)\n"
        "fs.plot(Causal(), select=chosen)\nprint((used() - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 700
