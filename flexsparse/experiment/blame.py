"""An error inside a rule, score or selector, told by its name and the line that raised."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import Any

import torch

import flexsparse
from flexsparse.errors import FlexSparseError, RuleError, SelectionError
from flexsparse.parameters import describe
from flexsparse.recording import where_in_traceback
from flexsparse.rules import MaskRule

# Installed packages stand in the first, this one and torch perhaps elsewhere.
_LIBRARIES = [
    Path(sysconfig.get_path("stdlib")),
    *(Path(str(module.__file__)).parent for module in (torch, flexsparse)),
]


def blamed(error: BaseException, rule: MaskRule | None, select: Any) -> FlexSparseError | None:
    """The error with its place in the user's own code; None where no code of theirs had part in it."""
    if isinstance(error, FlexSparseError):
        return _placed(error, rule)
    spot = _users_line(error)
    if spot is None:
        return None
    said = f"{type(error).__name__}: {_first_line(error)}"
    if select is not None:
        return SelectionError(f"{describe(select)} failed at {spot}: {said}")
    name = "the rule" if rule is None else describe(rule)
    return RuleError(f"{name} failed at {spot}: {said}")


def said(error: BaseException, rule: MaskRule | None, select: Any) -> str:
    """The same as one line, whatever raised it."""
    found = blamed(error, rule, select)
    text = f"{type(error).__name__}: {_first_line(error)}" if found is None else str(found)
    return " ".join(line.strip() for line in text.splitlines())


def _placed(error: FlexSparseError, rule: MaskRule | None) -> FlexSparseError:
    """A kernel knows no lines: what it could not compute is asked once more of the rule itself."""
    if not isinstance(error, RuleError) or rule is None or ".py:" in str(error):
        return error
    some = torch.arange(64)
    try:
        rule(torch.tensor(0), torch.tensor(0), some[:, None], some)
    except Exception as again:
        if (spot := where_in_traceback(again)) is not None:
            return RuleError(f"{error}, at {spot}")
    return error


def _users_line(error: BaseException) -> str | None:
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        parents = Path(frame.filename).parents
        if Path(frame.filename).is_file() and not any(root in parents for root in _LIBRARIES):
            found = f"{Path(frame.filename).name}:{frame.lineno} `{frame.line}`"
    return found


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no message")
