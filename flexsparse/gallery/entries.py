"""What the files of the gallery say of themselves, and the pictures that their examples draw.

A file's docstring is read by paragraph: the first is what the rule is, ``Source:`` and ``Known
elsewhere as:`` open two others, and the examples run. What they draw with `picture` is drawn here; of
a score, the one they call ``score``.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import io
import pkgutil
from contextlib import redirect_stdout
from dataclasses import MISSING, Field, dataclass, fields
from importlib import import_module
from types import ModuleType
from typing import Any

from flexsparse.gallery.drawing import drawn_rule, drawn_score
from flexsparse.resolve import kind_of
from flexsparse.scores import ScoreRule
from flexsparse.viz import picture


@dataclass(frozen=True)
class Parameter:
    """A field of a rule, as its class declares it."""

    name: str
    type: str
    default: str | None


@dataclass(frozen=True)
class Rule:
    """A class of the gallery; ``makers`` are its other ways to be made, as (call, first line)."""

    name: str
    kind: str
    text: str
    parameters: tuple[Parameter, ...]
    makers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Picture:
    """An example as SVG; ``shown`` says what, where that is no matter of course."""

    example: str
    svg: str
    shown: str = ""


@dataclass(frozen=True)
class Entry:
    """A file of the gallery."""

    name: str
    summary: str
    source: str
    elsewhere: str
    rules: tuple[Rule, ...]
    pictures: tuple[Picture, ...]


def entries() -> list[Entry]:
    """Every file of `flexsparse.masks`, in the order of their names."""
    package = import_module("flexsparse.masks")
    names = [entry.name for entry in pkgutil.iter_modules(package.__path__)]
    return [_entry(name, import_module(f"flexsparse.masks.{name}")) for name in names]


def _entry(name: str, module: ModuleType) -> Entry:
    paragraphs = (module.__doc__ or "").partition(">>>")[0].strip().split("\n\n")
    found = [value for value in vars(module).values() if isinstance(value, type)]
    return Entry(
        name=name,
        summary=paragraphs[0],
        source=_opened_by("Source:", paragraphs),
        elsewhere=_opened_by("Known elsewhere as:", paragraphs),
        rules=tuple(_rule(cls) for cls in found if cls.__module__ == module.__name__),
        pictures=tuple(_pictures(module)),
    )


def _opened_by(words: str, paragraphs: list[str]) -> str:
    return next((p.removeprefix(words).strip() for p in paragraphs if p.startswith(words)), "")


def _rule(cls: type) -> Rule:
    made = [(name, value) for name, value in vars(cls).items() if isinstance(value, staticmethod)]
    return Rule(
        name=cls.__name__,
        kind=str(kind_of(cls)),
        text=inspect.getdoc(cls) or "",
        parameters=tuple(_parameter(f) for f in fields(cls) if f.init),
        makers=tuple(
            (
                f"{cls.__name__}.{name}{_arguments(value)}",
                (inspect.getdoc(value) or "").split("\n")[0],
            )
            for name, value in made
        ),
    )


def _parameter(field: Field[Any]) -> Parameter:
    default = None if field.default is MISSING else repr(field.default)
    return Parameter(field.name, _type(field.type), default)


def _arguments(function: staticmethod[Any, Any]) -> str:
    return f"({', '.join(inspect.signature(function.__func__).parameters)})"


def _type(hint: object) -> str:
    return inspect.formatannotation(hint).replace("torch.", "").replace("flexsparse.rules.", "")


def _pictures(module: ModuleType) -> list[Picture]:
    found: list[Picture] = []
    example = ""

    def draw(*arguments: Any, **options: Any) -> str:
        text = picture(*arguments, **options)
        found.append(Picture(example, drawn_rule(text, example)))
        return text

    scope = dict(vars(module))
    for step in doctest.DocTestParser().get_examples(module.__doc__ or ""):
        example = _drawn_by(step.source)
        with redirect_stdout(io.StringIO()):
            exec(compile(step.source, f"<example of {module.__name__}>", "single"), scope)
        if scope.get("picture") is picture:
            scope["picture"] = draw
        score = scope.get("score")
        if isinstance(score, ScoreRule) and step.source.startswith("score ="):
            example = step.source.removeprefix("score =").strip()
            found.append(Picture(example, *drawn_score(score, example)))
    return found


def _drawn_by(source: str) -> str:
    """The rule that a line of an example draws, as it is written there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "picture":
            return ast.unparse(node.args[0])
    return ""
