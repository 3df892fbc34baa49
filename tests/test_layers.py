"""The rooms, and the arrows between them: a module imports from rows above, or from earlier in its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flexsparse

PACKAGE = Path(flexsparse.__file__).parent
ROOT = PACKAGE.parent

LAYERS = [
    "errors shapes trees nested versions grid canvas device shown",
    "parameters recording lifting likeness settling watching tracing bounds rules scores kernels given selection resolve",
    "arguments merge reference conditioning",
    "address program coverage cutting ordering occupancy intervals selectors",
    "ahead listed layout building updating moving chunks adapters budget",
    "backends rates cost overlap choice ways lengths telling result repeats fitting plan quicker planning",
    "attention modules",
    "checking samples measure",
    "viz",
    "hf experiment bench gallery verbs cli __main__",
]
PLACE = {room: (row, i) for row, names in enumerate(LAYERS) for i, room in enumerate(names.split())}
# Rows are read from the top; within `parameters` etc. the order of names is the order of imports.


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "flexsparse" else None


def imports(path: Path) -> list[tuple[str, bool]]:
    """(room, whether it is imported at once) of everything that a file imports from flexsparse."""
    tree = ast.parse(path.read_text())
    late = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef) or _types_only(block)
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
            if node.module == "flexsparse":
                modules = [f"flexsparse.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        found += [(r, id(node) not in late) for m in modules if (r := room(m))]
    return found


def _types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"


FILES = sorted(
    p for p in PACKAGE.rglob("*.py") if "masks" not in p.parts and p.name != "capture_smollm2.py"
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_upward(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own == "__init__":
        return
    assert own in PLACE, f"{own} has no place in LAYERS"
    for other, at_once in imports(path):
        if at_once and other != own and other in PLACE:
            assert PLACE[other] < PLACE[own], (
                f"{path.name} imports {other}, which stands below {own}"
            )


def test_the_gallery_imports_rules_scores_and_torch_only() -> None:
    allowed = {"errors", "canvas", "rules", "scores", "masks"}
    for path in sorted((PACKAGE / "masks").glob("*.py")):
        assert {r for r, _ in imports(path)} <= allowed, path.name


def test_nothing_optimised_imports_the_reference() -> None:
    for path in FILES:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if own in {
            "backends",
            "layout",
            "occupancy",
            "program",
            "coverage",
            "kernels",
            "selectors",
            "plan",
            "attention",
        }:
            assert "reference" not in {r for r, _ in imports(path)}, path.name


def test_every_folder_is_packaged() -> None:
    import tomllib

    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    folders = {
        ".".join(("flexsparse", *p.parent.relative_to(PACKAGE).parts))
        for p in PACKAGE.rglob("*.py")
    }
    assert listed == folders | {"flexsparse.masks"}


def test_files_stay_short() -> None:
    lengths = sorted(len(p.read_text().splitlines()) for p in FILES)
    assert lengths[len(lengths) // 2] < 250
    assert lengths[-1] <= 420


def test_import_is_light() -> None:
    """Heavy libraries load when they are asked for."""
    heavy = ("triton", "matplotlib", "transformers", "pydantic", "typer", "rich", "yaml", "jinja2")
    code = f"import flexsparse, sys; print([m for m in {heavy!r} if m in sys.modules and m not in before])"
    code = f"import torch, sys; before = set(sys.modules); {code}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
