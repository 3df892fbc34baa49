"""YAML read strictly, each value with its place, so that an error can point at it.

Scalars are YAML 1.2's: 1e-3 is a number, on, off, yes and no are words, 12:30 is not 750. A key
that is written twice is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flexsparse.errors import ConfigError
from flexsparse.resolve import did_you_mean

At = tuple[str | int, ...]

# What is a word or a mapping, as a mapping.
_MAPPINGS: dict[At, str] = {("input", "sample"): "{name: smollm2, tokens: 256}"}

# An anchor used by anchors grows without bound from a few lines.
_MOST = 100_000

_SCALARS = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own attribute)


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would not read back as a string."""

    yaml_implicit_resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, (_pattern, _first) in _SCALARS.items():
    for _form in (_Loader, _Dumper):
        _form.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), [*_first, ""]
        )


def dump(data: Any) -> str:
    """YAML that this module reads back as ``data``."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)
    return text


@dataclass
class Source:
    """``data`` as plain Python, and where in the file, or in which override, each part stands."""

    file: str
    data: Any
    places: dict[At, tuple[int, int] | str] = field(default_factory=dict)
    problems: list[tuple[At, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """What is wrong with an override itself, which has no place."""
    changes: dict[At, str] = field(default_factory=dict)
    """What overrides have set, as they were written."""
    left: list[int] | None = None
    """The numbers of the rows that run, where some were left out."""

    @property
    def folder(self) -> Path:
        """Where the file stands, and with it the files it names."""
        return Path(self.file).parent

    def note(self, at: At, message: str) -> None:
        """Keeps a problem, so that all of them are told at once."""
        if self.left is not None and len(at) > 1 and at[0] == "rows":
            # As the file counts them.
            at = ("rows", self.left[int(at[1])], *at[2:])
        self.problems.append((at, message))

    def raise_noted(self) -> None:
        told = sorted(self.problems, key=lambda problem: self._order(problem[0]))
        lines = [*(self._line(*problem) for problem in told), *self.refused]
        if lines:
            raise ConfigError("\n".join(dict.fromkeys(lines)))

    def override(self, argument: str) -> None:
        """Sets a value by ``rows.1.tile=64`` or ``rows.window.tile=64``; it is read as YAML."""
        try:
            self._set(argument)
        except ConfigError as error:
            self.refused.append(str(error))

    def _set(self, argument: str) -> None:
        path, equals, text = argument.partition("=")
        place = f"argument {argument!r}"
        if not equals or not path:
            raise ConfigError(f"{place}: an override is key=value, such as rows.1.tile=64")
        given = parse(text, place)
        given.raise_noted()
        value = given.data
        parts = path.split(".")
        at: At = ()
        holder = self.data
        while True:
            key, parts = self._next(holder, at, parts, place)
            at = (*at, key)
            if not parts:
                break
            if isinstance(holder, dict) and key not in holder:
                # What stands here now, too, stands here because of the override.
                holder[key], self.places[at] = {}, place
            holder = holder[key]
        holder[key] = value
        for old in [p for p in self.places if p[: len(at)] == at]:
            del self.places[old]
        self.places[at] = place
        self.changes[at] = text

    def _next(self, holder: Any, at: At, parts: list[str], place: str) -> tuple[Any, list[str]]:
        """The key or index that leads on, and what is left of the path."""
        where = _path(at) or "the configuration"
        if isinstance(holder, dict):
            # A key may have dots of its own, as ./mine.py:Banded has.
            for n in range(len(parts), 0, -1):
                if ".".join(parts[:n]) in holder:
                    return ".".join(parts[:n]), parts[n:]
            return parts[0], parts[1:]
        if isinstance(holder, list):
            names = [str(item.get("name", "")) if isinstance(item, dict) else "" for item in holder]
            for n in range(len(parts), 0, -1):
                if (name := ".".join(parts[:n])) in names:
                    return names.index(name), parts[n:]
            if parts[0].isdecimal() and int(parts[0]) < len(holder):
                return int(parts[0]), parts[1:]
            named = ", ".join(filter(None, names))
            raise ConfigError(
                f"{place}: {where} has the entries 0 to {len(holder) - 1}"
                f"{f' ({named})' if named else ''}, not {parts[0]!r}{did_you_mean(parts[0], names)}"
            )
        whole = _MAPPINGS.get(at) if isinstance(holder, str) else None
        hint = f": write it as a mapping, {where}='{whole}'" if whole else ""
        raise ConfigError(
            f"{place}: {where} is {shown(holder)}, which has no {parts[0]!r} to set{hint}"
        )

    def _known(self, at: At) -> At:
        while at and at not in self.places:
            at = at[:-1]
        return at

    def _order(self, at: At) -> tuple[int, int]:
        place = self.places.get(self._known(at), (1, 1))
        return (1 << 30, 0) if isinstance(place, str) else place

    def _line(self, at: At, message: str) -> str:
        place = self.places.get(self._known(at), (1, 1))
        where = place if isinstance(place, str) else f"{self.file}:{place[0]}:{place[1]}"
        message = " ".join(line.strip() for line in message.splitlines())
        return f"{where}: {_path(at)}: {message}" if at else f"{where}: {message}"


def _path(at: At) -> str:
    return ".".join(map(str, at))


def shown(value: object) -> str:
    """A value as YAML has it, in short.

    >>> shown(None), shown(True), shown("a")
    ('null', 'true', "'a'")
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:50]}…"


def read(file: Path | str) -> Source:
    """The file as it stands; its syntax is judged here, its meaning elsewhere."""
    name = str(file)
    try:
        text = Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {name}{_near(Path(file))}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {name}: byte {error.start} is not UTF-8") from None
    return parse(text, name)


def parse(text: str, name: str) -> Source:
    """Like `read`, from text; ``name`` stands in errors. Repeated keys are noted, not raised."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        source = Source(name, None)
        if node is not None:
            source.data = _value(node, (), source, loader, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(f"{where}: {_problem(error)}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"{name}:{before.count(chr(10)) + 1}:{error.position - before.rfind(chr(10))}"
        raise ConfigError(
            f"{where}: the character {chr(int(error.character))!r} cannot stand in YAML"
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply to be a configuration") from None
    return source


def _value(
    node: yaml.Node, at: At, source: Source, loader: _Loader, within: tuple[yaml.Node, ...]
) -> Any:
    source.places.setdefault(at, _mark(node))
    if len(source.places) > _MOST:
        raise ConfigError(f"{source.file}: more than {_MOST:,} values, anchors written out")
    if any(node is outer for outer in within):
        source.note(at, "an anchor holds itself")
        return None
    if isinstance(node, yaml.SequenceNode):
        return [
            _value(item, (*at, i), source, loader, (*within, node))
            for i, item in enumerate(node.value)
        ]
    if not isinstance(node, yaml.MappingNode):
        try:
            return loader.construct_object(node)
        except ValueError:
            source.note(at, "is no number that can be read: it has too many digits")
            return None
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or not key_node.tag.endswith(":str"):
            line, column = _mark(key_node)
            source.note(at, f"a key must be a word, at line {line}, column {column}")
            continue
        inner = (*at, key)
        if key in found:
            line, column = _mark(key_node)
            source.note(inner, f"written a second time at line {line}, column {column}")
            continue
        source.places[inner] = _mark(key_node)
        found[key] = _value(value_node, inner, source, loader, (*within, node))
    return found


def _mark(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = str(error.problem or error.context)
    if "\\t" in problem:
        return "a tab cannot stand here: indent with spaces"
    if problem == "mapping values are not allowed here":
        return (
            "a second 'key:' in one value: put it on a line of its own, indented as its "
            "neighbours are, or quote the value"
        )
    return f"not YAML: {problem}"


def _near(file: Path) -> str:
    beside = [path.stem for path in file.parent.glob(f"*{file.suffix}")] if file.suffix else []
    return did_you_mean(file.stem, beside)
