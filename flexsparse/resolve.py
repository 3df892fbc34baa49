"""A name to what it means: a gallery name, an import path, or ``./file.py:Name``. No registry.

The gallery is the files of `flexsparse.masks` and `flexsparse.selectors`: the file's name is the
name, its public class is what is meant.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal, get_args

from flexsparse.errors import ConfigError
from flexsparse.rules import MaskRule
from flexsparse.scores import ScoreRule

Kind = Literal["rule", "score", "selector"]


def resolve(name: str, kind: Kind | None = None, beside: Path | None = None) -> Any:
    """The class, function or instance that ``name`` stands for; ``kind`` is what it will be used as.

    A file is looked for in ``beside``, then in the current folder.

    >>> resolve("prefix_lm", "rule").__name__
    'PrefixLM'
    >>> resolve("flexsparse.masks:Causal", "rule").__name__
    'Causal'
    """
    where, colon, attribute = name.rpartition(":")
    if not colon:
        return _named(name, kind, beside)
    module = _file(where, beside) if where.endswith(".py") else _module(where)
    found = _attribute(module, where, attribute)
    # A function may also make what is wanted: what it returns is judged where it is called.
    free = callable(found) and not isinstance(found, type | MaskRule | ScoreRule)
    if kind is not None and kind_of(found) != kind and not free:
        raise ConfigError(f"{name} is not a {kind}: {_said(found)}")
    return found


def gallery(kind: Kind) -> dict[str, type]:
    """Every name of a kind that needs no import path, with its class."""
    package = importlib.import_module(
        "flexsparse.selectors" if kind == "selector" else "flexsparse.masks"
    )
    found = {}
    for entry in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{entry.name}")
        classes = [
            c
            for c in _own(module)
            if isinstance(c, type) and kind_of(c) == kind and not inspect.isabstract(c)
        ]
        if classes and entry.name != "base":
            # prefix_lm is PrefixLM and oracle is OracleTopK: the alike one, or the first.
            alike = [c for c in classes if c.__name__.lower() == entry.name.replace("_", "")]
            found[entry.name] = (alike or classes)[0]
    return found


def kind_of(found: object) -> Kind | None:
    """What a class, an instance or a plain mod can be used as; None where that cannot be told."""
    base = importlib.import_module("flexsparse.selectors.base").Selector
    kinds: list[tuple[Kind, type]] = [("rule", MaskRule), ("score", ScoreRule), ("selector", base)]
    owner = found if isinstance(found, type) else type(found)
    for kind, root in kinds:
        if issubclass(owner, root):
            return kind
    if not isinstance(found, FunctionType):
        return None
    # A plain mask_mod takes (b, h, q_idx, kv_idx), a score_mod the score before them.
    mods: dict[int, Kind] = {4: "rule", 5: "score"}
    return mods.get(len(inspect.signature(found).parameters))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing where nothing is near.

    >>> did_you_mean("tokenz", ["tokens", "rows"])
    " (did you mean 'tokens'?)"
    """
    near = get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def find_file(name: str, beside: Path | None = None) -> Path:
    """The file of this name in ``beside``, or else in the current folder."""
    folders = [folder.resolve() for folder in (beside, Path()) if folder is not None]
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).resolve()
    looked = " or ".join(dict.fromkeys(map(str, folders)))
    raise ConfigError(
        f"there is no file {name}" + ("" if name.startswith("/") else f" in {looked}")
    )


def _named(name: str, kind: Kind | None, beside: Path | None) -> Any:
    if name.endswith(".py") or "/" in name:
        module = _file(name, beside)
        names = [n.__name__ for n in _own(module)] or ["nothing public"]
        raise ConfigError(
            f"{name} needs the object's name, {name}:NAME; it defines {', '.join(names)}"
        )
    kinds = get_args(Kind) if kind is None else (kind,)
    known: dict[str, type] = {}
    for each in kinds:
        known |= gallery(each)
    if name in known:
        return known[name]
    for other in get_args(Kind):
        if other not in kinds and name in gallery(other):
            raise ConfigError(f"{name} is a {other}, not a {kind}")
    if "." in name:
        module_name, _, attribute = name.rpartition(".")
        raise ConfigError(
            f"an import path has a colon before the object: {module_name}:{attribute}, not {name}"
        )
    near = did_you_mean(name, known)
    # Who is a letter off needs no list of all.
    all_of_them = (
        "`flexsparse list` shows them" if near else f"there are {', '.join(sorted(known))}"
    )
    raise ConfigError(
        f"no {kind or 'rule, score or selector'} is named {name!r}{near}; {all_of_them}, beside import "
        "paths such as my_lab.rules:Name, and ./file.py:Name"
    )


def _module(where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        # One of the module's own imports may be what is missing.
        asked = where.split(".")
        inner = error.name not in [".".join(asked[: i + 1]) for i in range(len(asked))]
        detail = (
            f": it needs {error.name}" if inner else ": it is neither installed nor in the folder"
        )
        raise ConfigError(f"cannot import {where}{detail}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot import {where}: {_fault(error)}") from error


def _file(where: str, beside: Path | None) -> ModuleType:
    path = find_file(where, beside)
    # A dataclass looks its module up by name, and two rows may name one file.
    name = f"{path.stem} {path}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that ends itself is no reason to end here
        del sys.modules[name]
        raise ConfigError(f"cannot run {where}: {_fault(error)}{_line(error, path)}") from error
    return module


def _attribute(module: ModuleType, where: str, attribute: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n.__name__ for n in _own(module)]
            defines = f"; it defines {', '.join(names)}" if names else ""
            near = did_you_mean(attribute, [n for n in vars(module) if not n.startswith("_")])
            raise ConfigError(f"{where} has no {attribute}{near}{defines}")
        found = getattr(found, part)
    return found


def _own(module: ModuleType) -> list[Any]:
    """The public classes and functions that a module defines itself, in the order it does."""
    return [
        value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        and isinstance(getattr(value, "__name__", None), str)
    ]  # fmt: skip


def _said(found: object) -> str:
    kind = kind_of(found)
    if kind is not None:
        return f"it is a {kind}"
    if isinstance(found, type):
        return f"it is the class {found.__name__}"
    return f"it is of type {type(found).__name__}"


def _line(error: BaseException, path: Path) -> str:
    """Where a file failed, by its own last line; a syntax error says it itself."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    return f" at {path.name}:{own[-1].lineno} `{own[-1].line}`" if own else ""


def _fault(error: BaseException) -> str:
    line = next((text for text in str(error).splitlines() if text.strip()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
