"""An object of the command line: its name, and its arguments as ``key=value``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flexsparse.errors import ConfigError
from flexsparse.experiment.build import build_part, build_rule
from flexsparse.experiment.source import At, Source, parse


def named(name: str, arguments: Iterable[str] = ()) -> Any:
    """The rule, score or selector; ``{and: [causal, …]}``, as a configuration writes it, is a rule.

    >>> named("sliding_window", ["size=4"])
    SlidingWindow(size=4)
    >>> named("{and: [causal, {not: {sliding_window: {size: 4}}}]}")
    Causal() & ~SlidingWindow(size=4)
    """
    given = Source(name, {})
    for argument in arguments:
        given.override(argument)
    problems: list[str] = []

    def note(at: At, message: str) -> None:
        problems.append(f"{at[-1]}: {message}" if len(at) > 1 else message)

    made: Any
    if name.lstrip().startswith("{"):
        if given.data:
            raise ConfigError(f"{name} holds its arguments: write them into it, not after it")
        made = build_rule(parse(name, "the rule").data, (), note)
    else:
        made = build_part({name: given.data} if given.data else name, None, (), note)
    if problems:
        raise ConfigError("\n".join(problems))
    return made() if isinstance(made, type) else made
