"""An object of the command line: its name, and its arguments as ``key=value``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flexsparse.errors import ConfigError
from flexsparse.experiment.build import build_part, build_rule
from flexsparse.experiment.source import Source, parse


def named(name: str, arguments: Iterable[str] = ()) -> Any:
    """The rule, score or selector; ``{and: [causal, …]}``, as a configuration writes it, is a rule.

    >>> named("sliding_window", ["size=4"])
    SlidingWindow(size=4)
    >>> named("{and: [causal, {not: {sliding_window: {size: 4}}}]}")
    Causal() & ~SlidingWindow(size=4)
    """
    if name.lstrip().startswith("{"):
        if list(arguments):
            raise ConfigError(f"{name} holds its arguments: write them into it, not after it")
        given = parse(name, "the rule")
        made: Any = build_rule(given.data, (), given)
    else:
        given = Source("", {})
        for argument in arguments:
            given.override(argument)
        given.raise_noted()
        made = build_part({name: given.data} if given.data else name, None, (), given)
    if given.problems:
        # Here is no file to point into: the argument's name is the place.
        told = (f"{at[-1]}: {said}" if len(at) > 1 else said for at, said in given.problems)
        raise ConfigError("\n".join(told))
    return made() if isinstance(made, type) else made
