"""A mod as straight-line code over tensors: what may be fused into a kernel, and why the rest may not.

A mask_mod or score_mod runs once on fake index tensors. Each operation passes a recorder, which
refuses with the user's own line whatever a fused kernel cannot do, and keeps the rest as code that
does not contain a single tensor: every tensor the mod reads becomes an argument. Two rules of one
kind, whatever their parameters, thus give the same code and share one kernel.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from flexsparse.errors import FlexSparseError, RuleError
from flexsparse.likeness import Meaning, meaning
from flexsparse.parameters import is_number
from flexsparse.recording import PROBE, NoValues, Recorder, Refusal, defined_at, where_in_traceback

MASK_ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
SCORE_ARGUMENTS = ("score", *MASK_ARGUMENTS)
Within = AbstractContextManager[object]


@dataclass(frozen=True, eq=False)
class Traced:
    """The code of a mod, and the tensors it reads, in the order of the code's ``t0, t1, …``."""

    name: str
    code: str
    tensors: tuple[Tensor, ...]
    uses: frozenset[str]
    call: Callable[..., Tensor]
    kind: str
    """The same for all mods that can share a kernel."""
    gathers: int
    """How many table entries are read anew for each (query, key) pair."""
    repeated: tuple[bool, ...]
    """For each tensor, whether it is the same one as an earlier."""
    divisions: tuple[str, ...]
    """The user's lines that divide by an integer, which may be 0 at some position."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "call"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A function that no module holds cannot be pickled; its source can.
        vars(self).update(state, call=function_of(state["code"]))
        keep(self)

    @property
    def has_doubles(self) -> bool:
        """Whether it computes in double precision somewhere."""
        read = any(t.dtype == torch.float64 and not is_number(t) for t in self.tensors)
        return read or "torch.float64" in self.code

    def bare(self) -> Traced:
        """The code alone."""
        return replace(self, tensors=())


# A custom operator carries strings and tensors only, and finds code here. Entries hold no tensor of a
# user, one for each kind, so the table stays small. They are written where a mod is traced: what code
# under torch.compile writes down is there only after its graph has run.
_codes: dict[str, Traced] = {}


def keep(traced: Traced) -> None:
    if traced.kind not in _codes:
        _codes[traced.kind] = traced.bare()


def code_of(kind: str) -> Traced:
    """The code of a mod traced before, without its tensors."""
    if (code := _codes.get(kind)) is None:
        raise RuleError(
            f"the code of rule or score {kind} is unknown in this process: make the rule here, and "
            "call attention or make_plan with it once, before running what was exported with it"
        )
    return code


def trace(mod: Callable[..., Any], arguments: Sequence[str], name: str) -> Traced:
    """Runs ``mod`` once on fake indices; raises `RuleError` where it cannot become a kernel."""
    check_arity(mod, arguments, name)
    with _apart():
        return _traced(mod, arguments, name, *_recorded(mod, arguments, name, nullcontext()))


def understood(
    mod: Callable[..., Any], arguments: Sequence[str], name: str, within: Within | None = None
) -> tuple[Traced, Meaning]:
    """The trace, run ``within`` a mode, and what it means apart from how its numbers were given."""
    check_arity(mod, arguments, name)
    with _apart():
        recorded = _recorded(mod, arguments, name, within or nullcontext())
        return _traced(mod, arguments, name, *recorded), meaning(*recorded)


@contextmanager
def _apart() -> Iterator[None]:
    # In inference mode torch hands composite operations on whole, as nobody wrote them.
    # Nor is a rule's code part of what torch.func transforms.
    with torch.inference_mode(False), torch.no_grad(), temporarily_clear_interpreter_stack():
        yield


def _recorded(
    mod: Callable[..., Any], arguments: Sequence[str], name: str, within: Within
) -> tuple[Recorder, str]:
    recorder = Recorder(name)
    inputs = [recorder.argument(a, PROBE[a]) for a in arguments]
    try:
        with recorder.fake, recorder, NoValues(recorder), within:
            result = mod(*inputs)
    except Refusal as refusal:
        raise RuleError(str(refusal)) from None
    except FlexSparseError:
        raise
    except Exception as error:
        where = where_in_traceback(error) or "its body"
        raise RuleError(f"{name} failed at {where}: {type(error).__name__}: {error}") from error
    try:
        return recorder, recorder.result(result, "score" in arguments, defined_at(mod))
    except Refusal as refusal:
        raise RuleError(str(refusal)) from None


def _traced(
    mod: Callable[..., Any], arguments: Sequence[str], name: str, recorder: Recorder, variable: str
) -> Traced:
    source = recorder.source(arguments, variable)
    forms = ";".join(f"{t.dtype}/{t.ndim}/{t.requires_grad}" for t in recorder.captured)
    return Traced(
        name=name,
        code=source,
        tensors=tuple(recorder.captured),
        uses=recorder.reach(variable) & frozenset(arguments),
        call=function_of(source),
        kind=hashlib.sha256(f"{source}\n{forms}".encode()).hexdigest()[:16],
        gathers=recorder.gathers(variable),
        repeated=tuple(
            any(t is earlier for earlier in recorder.captured[:i])
            for i, t in enumerate(recorder.captured)
        ),
        divisions=tuple(dict.fromkeys(recorder.divisions)),
    )


@contextmanager
def naming(traced: Traced | None) -> Iterator[None]:
    """Gives what a rule does wrong at some position the rule's name, and its line."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        name = traced.name if traced else "the mask"
        if "ZeroDivision" in str(error):
            spots = " or ".join(traced.divisions) if traced else ""
            raise RuleError(
                f"{name} divides by zero at {spots or 'its body'}: keep the divisor from 0 at every "
                "position and head, such as kv_idx % n.clamp(min=1)"
            ) from error
        if not isinstance(error, IndexError):
            raise
        raise RuleError(f"{name} reads a table past its end: {error}") from error


def check_arity(mod: Callable[..., Any], arguments: Sequence[str], name: str) -> None:
    """Refuses a mod that does not take exactly the arguments of its slot."""
    if not callable(mod):
        raise RuleError(
            f"{name} must be a function of ({', '.join(arguments)}), got {type(mod).__name__}"
        )
    try:
        parameters = inspect.signature(mod).parameters.values()
    except (TypeError, ValueError):
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    if len(required) <= len(arguments) <= len(positional):
        return
    hint = ""
    if len(required) == len(SCORE_ARGUMENTS) and len(arguments) == len(MASK_ARGUMENTS):
        hint = "; five arguments are a score_mod: pass it as score="
    if len(required) == len(MASK_ARGUMENTS) and len(arguments) == len(SCORE_ARGUMENTS):
        hint = "; four arguments are a mask_mod: pass it as rule="
    raise RuleError(
        f"{name} must take {len(arguments)} arguments ({', '.join(arguments)}), "
        f"but takes {len(required)}: ({', '.join(p.name for p in positional)}){hint}"
    )


def function_of(source: str, **names: Any) -> Callable[..., Tensor]:
    """The function of a recorded ``source``, which reads ``torch`` and ``names``."""
    # The name of the file is the code itself, in short: torch's stack traces stay apart by kind.
    filename = f"<mod {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    scope: dict[str, Any] = {"torch": torch, **names}
    exec(compile(source, filename, "exec"), scope)
    function = scope["mod"]
    assert isinstance(function, FunctionType)
    return function
