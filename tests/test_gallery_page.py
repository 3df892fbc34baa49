"""The gallery's page: every rule is on it, framed, with the picture that its own example draws."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from dataclasses import fields
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest

import flexsparse.masks
from flexsparse.gallery.drawing import drawn_rule
from flexsparse.gallery.entries import Entry, entries
from flexsparse.gallery.page import write_page

ENTRIES = {entry.name: entry for entry in entries()}


def cells(svg: str) -> set[tuple[int, int]]:
    """The cells that a picture fills, read back from its path."""
    path = re.search(r'class="seen" d="([^"]*)"', svg)
    assert path is not None
    runs = re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path[1])
    assert len(runs) == path[1].count("M")
    return {(x, int(y)) for x0, y, n in runs for x in range(int(x0), int(x0) + int(n))}


def test_every_rule_of_the_gallery_has_an_entry() -> None:
    on_it = [rule.name for entry in ENTRIES.values() for rule in entry.rules]
    assert sorted(on_it) == sorted(flexsparse.masks.__all__)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_file_is_framed(name: str) -> None:
    """Its source with an address, its other names, and each parameter in words, with a picture."""
    entry = ENTRIES[name]
    assert re.search(r"https://\S+", entry.source) and entry.elsewhere
    assert re.fullmatch(r"[A-Z].*[.]", entry.summary, re.DOTALL)
    for rule in entry.rules:
        cls = getattr(flexsparse.masks, rule.name)
        named = [parameter.name for parameter in rule.parameters]
        assert named == [field.name for field in fields(cls) if field.init]
        for parameter in named:
            assert f"``{parameter}``" in rule.text, f"{rule.name} does not say what {parameter} is"
        assert any(rule.name in picture.example for picture in entry.pictures), rule.name


@pytest.mark.parametrize("name", [n for n, e in ENTRIES.items() if e.rules[0].kind == "rule"])
def test_a_picture_is_what_the_doctest_shows(name: str) -> None:
    steps = doctest.DocTestParser().get_examples(
        import_module(f"flexsparse.masks.{name}").__doc__ or ""
    )
    texts = [
        [line for line in step.want.splitlines() if set(line) <= {"#", "."}]
        for step in steps
        if "picture(" in step.source
    ]
    pictures = ENTRIES[name].pictures
    assert texts and len(pictures) == len(texts)
    for shown, lines in zip(pictures, texts, strict=True):
        filled = {(x, y) for y, line in enumerate(lines) for x, c in enumerate(line) if c == "#"}
        assert cells(shown.svg) == filled
        assert f'viewBox="0 0 {len(lines[0])} {len(lines)}"' in shown.svg


def test_a_score_of_pairs_is_a_heat_map_and_any_other_a_curve() -> None:
    def svg(entry: Entry) -> str:
        return entry.pictures[0].svg

    assert "polyline" in svg(ENTRIES["softcap"]) and "polyline" in svg(ENTRIES["temperature"])
    # Two rows, of 16 pairs each: ALiBi falls to the left and rises to the right of the diagonal.
    shades = [float(x) for x in re.findall(r'opacity="([\d.]+)"', svg(ENTRIES["alibi"]))]
    assert len(shades) == 256 and shades[16:32] == sorted(shades[16:32])
    assert (shades[15], shades[240], shades[0]) == (1.0, 0.0, 0.5)


def test_a_picture_says_what_it_shows_also_to_who_cannot_see_it() -> None:
    assert 'aria-label="Banded(&quot;&lt;2&quot;)"' in drawn_rule("#.", 'Banded("<2")')


class Tags(HTMLParser):
    """Whether every element is closed, and what the page would load from elsewhere."""

    VOID = frozenset({"meta", "rect", "path", "polyline", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "link", "img", "iframe") or "src" in given:
            self.loads.append(tag)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag


def test_an_option_is_no_file_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flexsparse.gallery", "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode != 0 and "usage: python -m flexsparse.gallery [FILE]" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_page_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "gallery.html"
    done = subprocess.run(
        [sys.executable, "-m", "flexsparse.gallery", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(path)
    text = path.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert not tags.open and not tags.loads and "@import" not in text and "url(" not in text
    assert tags.ids == [
        e.name for kind in ("rule", "score") for e in ENTRIES.values() if e.rules[0].kind == kind
    ]
    for entry in ENTRIES.values():
        for picture in entry.pictures:
            assert picture.svg in text
    write_page(tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == text
