"""The recorder of a mod: each operation as a line of code, or a refusal with the user's own line."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flexsparse.errors import RuleError
from flexsparse.nested import leaves, mapped
from flexsparse.parameters import is_number

# Every axis has a length of its own, so that a result with a foreign axis shows.
PROBE = {
    "b": (2, 1, 1, 1),
    "h": (1, 3, 1, 1),
    "q_idx": (1, 1, 5, 1),
    "kv_idx": (1, 1, 1, 7),
    "score": (2, 3, 5, 7),
}
_POINTWISE_UNTAGGED = frozenset({"aten.floor_divide", "aten.fmod", "aten.where"})
_DIVIDES = frozenset({"aten.remainder", "aten.floor_divide", "aten.fmod", "aten.div"})
_PACKAGE = Path(__file__).resolve().parent
_TORCH = Path(torch.__file__).resolve().parent


class Refusal(Exception):
    """A refusal on its way out. No TypeError: torch's operators would swallow one."""


@dataclass(frozen=True, eq=False)
class Step:
    """An operation as it was recorded: ``call`` is its code, which makes ``variable`` of a ``dtype`` from
    the names in ``read``; ``func`` was given ``args`` and ``kwargs``."""

    variable: str
    call: str
    read: frozenset[str]
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype


# Where memory lies says nothing about what is computed.
_OF_MEMORY = ("layout", "pin_memory", "memory_format")


@dataclass(frozen=True)
class _Fix:
    """What an operation is called in a refusal, and what to write instead."""

    what: str
    instead: str


_REDUCED = _Fix(
    "reduces over an axis or a list of values",
    "a kernel sees one (query, key) pair at a time: precompute a boolean table, capture it, "
    "and index it, such as table[q_idx, kv_idx]; candidate lists belong in a Selection",
)
_MUTATED = _Fix(
    "writes in place", "write m = m & other instead of m &= other, and keep no counters"
)
_RANDOM = _Fix("draws random numbers", "draw a tensor once, capture it, and index it")
_VALUE = _Fix(
    "asks for the value of a tensor",
    "indices have no value until the kernel runs: use &, |, ~, torch.where, torch.maximum, or "
    "index a captured tensor, torch.tensor(values) for a list",
)
_ARRAY = _Fix(
    "hands an index to numpy",
    "a kernel reads tensors: capture torch.from_numpy(table) instead of table, and index it",
)
_SLICED = _Fix(
    "slices a captured tensor, or leaves an axis of it unindexed",
    "index every axis by a scalar, such as table[b, h, q_idx, kv_idx]",
)
_SHAPED = _Fix(
    "uses the shape of an index",
    "an index is one number a pair in a kernel: write torch.ones_like(q_idx), or capture a length",
)
_KEEPS_SHAPE = frozenset({"aten._to_copy", "aten.clone", "aten.detach"})
_COMPUTED = _Fix("indexes a tensor that it computes", "compute the table first, and capture it")


_BRANCH = _Fix(
    "branches in Python on a tensor",
    "indices have no value until the kernel runs: write & for and, | for or, ~ for not, "
    "(a <= x) & (x < b) for a <= x < b, (x == a) | (x == b) for x in (a, b), torch.where for if, "
    "torch.maximum for max",
)
_READS_VALUE = {
    Tensor.__bool__: _BRANCH,
    Tensor.__contains__: _BRANCH,
    Tensor.__index__: _VALUE,
    Tensor.__int__: _VALUE,
    Tensor.__float__: _VALUE,
    Tensor.item: _VALUE,
    Tensor.tolist: _VALUE,
    Tensor.numpy: _VALUE,
    Tensor.__array__: _ARRAY,
}


_READS_SHAPE = (Tensor.size, Tensor.numel, Tensor.shape.__get__)  # type: ignore[attr-defined]


class NoValues(TorchFunctionMode):
    """Refuses what reads a tensor's value in Python, before torch answers in its own words."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (fix := _READS_VALUE.get(func)) is not None:
            self.recorder.refuse(fix)
        if func in _READS_SHAPE and args and self.recorder.computes(args[0]):
            self.recorder.refuse(_SHAPED)
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Writes down each operation of a mod, and refuses what a fused kernel cannot do."""

    def __init__(self, name: str) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.steps: list[Step] = []
        self.captured: list[Tensor] = []
        self.divisions: list[str] = []
        self._stand_ins: list[Tensor] = []
        self._names: dict[int, str] = {}
        self._alive: list[Tensor] = []  # ids stay unique while their tensors live

    def argument(self, name: str, shape: tuple[int, ...]) -> Tensor:
        with self.fake:
            tensor = torch.empty(
                shape, dtype=torch.float32 if name == "score" else torch.int64, device="cpu"
            )
        return self._named(tensor, name)

    def _named(self, tensor: Tensor, name: str) -> Tensor:
        self._names[id(tensor)] = name
        self._alive.append(tensor)
        return tensor

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        flat = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        constant = all(self._names.get(id(x), "t").startswith("t") for x in flat)
        packet = str(func.overloadpacket)
        if packet == "aten.lift_fresh":
            return args[0]
        if flat and constant and _is_view(func):
            # A view of captured tensors shares their memory: capture the view itself.
            with _disable_current_modes(), torch.enable_grad():
                return func(*args, **kwargs)
        self._refuse(func, packet, args, flat)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        if packet == "aten.index" and args[0].requires_grad and id(args[0]) in self._names:
            # FlexAttention sums the gradient of a captured tensor at one place only.
            self._capture(args[0])
        if packet == "aten.scalar_tensor" and kwargs.get("dtype") == torch.get_default_dtype():
            kwargs["dtype"] = torch.float32
        if self._takes_the_default_precision(func, args, kwargs, flat):
            if not flat:
                kwargs["dtype"] = torch.float32
            else:
                args, kwargs = mapped((args, kwargs), self._single)
                flat = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        inputs = [self._text(x) for x in args]
        said = {k: v for k, v in kwargs.items() if k not in _OF_MEMORY}
        keywords = [f"{k}={'device' if k == 'device' else self._text(v)}" for k, v in said.items()]
        stood = mapped((args, kwargs), self._stand_in)
        result = func(*stood[0], **stood[1])
        if not isinstance(result, Tensor):
            return result
        if packet != "aten.index" and func.namespace != "aten":
            shapes = [x.shape for x in leaves(stood) if isinstance(x, Tensor)]
            if result.shape != torch.broadcast_shapes(*shapes):
                self.refuse(_REDUCED)
        if packet in _DIVIDES and not result.is_floating_point():
            self.divisions.append(self._user_line())
        variable = f"v{len(self.steps)}"
        call = f"torch.ops.{func}({', '.join(inputs + keywords)})"
        if packet == "aten.index":
            # As the user wrote it: FlexAttention differentiates a captured tensor where Python
            # indexes it, and nowhere else.
            call = f"{inputs[0]}{inputs[1]}"
        read = frozenset(n for x in flat if (n := self._names.get(id(x))))
        self.steps.append(Step(variable, call, read, func, args, said, result.dtype))
        return self._named(result, variable)

    def _takes_the_default_precision(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flat: list[Tensor]
    ) -> bool:
        """Whether floats come of integers alone: torch then asks what the user's default is, but
        what may be seen must not depend on it, and a kernel computes with positions in fp32."""
        if "dtype" in kwargs or func.namespace != "aten":
            return False
        # A number of the user's has no precision of its own.
        if any(x.is_floating_point() and not is_number(x) for x in flat):
            return False
        stood = mapped((args, kwargs), self._stand_in)
        result = func(*stood[0], **stood[1])
        return isinstance(result, Tensor) and result.is_floating_point()

    def _single(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype == torch.bool:
            return value
        # Recorded like an operation of the user's.
        cast = torch.ops.aten._to_copy.default
        return self.__torch_dispatch__(cast, (), (value,), {"dtype": torch.float32})

    def _refuse(self, func: Any, packet: str, args: tuple[Any, ...], flat: list[Tensor]) -> None:
        if "_local_scalar_dense" in packet or packet in ("aten.item", "aten.equal"):
            self.refuse(_VALUE)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse(_RANDOM)
        if func._schema.is_mutable:
            self.refuse(_MUTATED)
        if packet == "aten.index":
            table, indices = args
            if id(table) in self._names and not self._names[id(table)].startswith("t"):
                self.refuse(_COMPUTED)
            if len(indices) != table.ndim or any(i is None for i in indices):
                self.refuse(_SLICED)
            if any(i.dtype == torch.bool for i in indices):
                self.refuse(_REDUCED)
            return
        if func.namespace == "aten":
            if packet in ("aten.slice", "aten.select", "aten.narrow", "aten.unbind", "aten.split"):
                self.refuse(_SLICED)
            made = not flat and packet in (
                "aten.full",
                "aten.zeros",
                "aten.ones",
                "aten.scalar_tensor",
            )
            like = packet in (
                "aten._to_copy", "aten.clone", "aten.detach", "aten.zeros_like", "aten.ones_like",
                "aten.full_like", "aten.new_ones", "aten.new_zeros", "aten.new_full",
            )  # fmt: skip
            if made or like:
                if packet not in _KEEPS_SHAPE and any(isinstance(a, list) and a for a in args):
                    self.refuse(_SHAPED)
                return
            if torch.Tag.pointwise not in func.tags and packet not in _POINTWISE_UNTAGGED:
                self.refuse(_REDUCED)
        for tensor in flat:
            if tensor.ndim and self._names.get(id(tensor), "t").startswith("t"):
                raise Refusal(
                    f"{self.name} uses a captured tensor of shape {list(tensor.shape)} whole at "
                    f"{self._user_line()}: index it, such as table[b] or table[q_idx]"
                )

    def refuse(self, fix: _Fix, spot: str | None = None) -> None:
        raise Refusal(f"{self.name} {fix.what} at {spot or self._user_line()}: {fix.instead}")

    def _user_line(self) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if is_users(frame.f_code.co_filename):
                return _spot(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return "its body"

    def _capture(self, tensor: Tensor) -> str:
        name = f"t{len(self.captured)}"
        self.captured.append(tensor)
        self._named(tensor, name)
        with _disable_current_modes(), self.fake:
            self._stand_ins.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        return name

    def _stand_in(self, value: Any) -> Any:
        """Captured tensors may live anywhere; the recording happens on fake CPU tensors."""
        if isinstance(value, Tensor):
            name = self._names.get(id(value)) or self._capture(value)
            if name.startswith("t"):
                return self._stand_ins[int(name[1:])]
        return value

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._names.get(id(value)) or self._capture(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._text(v) for v in value)}]"
        if isinstance(value, float):
            return (
                f"float({str(value)!r})"
                if value != value or abs(value) == float("inf")
                else repr(value)
            )
        return str(value) if isinstance(value, torch.dtype) else repr(value)

    def result(self, value: Any, is_score: bool, spot: str) -> str:
        """The variable that the mod defined at ``spot`` returned, if it is what its slot needs."""
        wanted = "a float tensor (the new score)" if is_score else "a bool tensor"
        if not isinstance(value, Tensor):
            raise RuleError(
                f"{self.name} must return {wanted}, but returned {value!r} ({type(value).__name__}): "
                "compute it from the indices, such as q_idx >= kv_idx"
            )
        if is_score and not value.is_floating_point():
            raise RuleError(
                f"{self.name} must return {wanted}, but returned {value.dtype}: what may be seen is "
                "a rule (rule=); a score changes the score, such as score + bias[h]"
            )
        if not is_score and value.dtype != torch.bool:
            raise RuleError(
                f"{self.name} must return {wanted}, but returned {value.dtype}: compare, such as "
                "value > 0; what changes a score is a score_mod (score=)"
            )
        name = self._text(value)
        if name.startswith("t") and value.ndim:
            self.refuse(_SLICED, spot)
        if value.ndim > 4 or any(
            n not in (1, p) for n, p in zip(value.shape[::-1], PROBE["score"][::-1], strict=False)
        ):
            self.refuse(_SLICED, spot)
        return name

    def reach(self, variable: str) -> frozenset[str]:
        """Every name that ``variable`` depends on."""
        reached = {variable}
        for step in reversed(self.steps):
            if step.variable in reached:
                reached |= step.read
        return frozenset(reached)

    def name_of(self, tensor: Tensor) -> str:
        """The name under which a tensor was recorded."""
        return self._names[id(tensor)]

    def computes(self, tensor: Tensor) -> bool:
        """Whether a tensor is an index or made from one, not captured."""
        return not self._names.get(id(tensor), "t").startswith("t")

    def needed(self, variable: str) -> list[Step]:
        """The steps that ``variable`` takes."""
        reached = self.reach(variable)
        return [step for step in self.steps if step.variable in reached]

    def gathers(self, variable: str) -> int:
        pair = {"q_idx", "kv_idx"}
        reads = [s for s in self.needed(variable) if "[" in s.call.partition("(")[0]]
        return sum(pair <= self.reach(step.variable) for step in reads)

    def source(self, arguments: Sequence[str], variable: str) -> str:
        names = [*arguments, *(f"t{i}" for i in range(len(self.captured)))]
        body = [f"    {step.variable} = {step.call}" for step in self.needed(variable)]
        if any("device=device" in line for line in body):
            body.insert(0, "    device = q_idx.device")
        return "\n".join([f"def mod({', '.join(names)}):", *body, f"    return {variable}", ""])


def _is_view(func: Any) -> bool:
    return any(
        a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments
    )


def is_users(filename: str) -> bool:
    """Whether code in such a file is the author's of a rule."""
    path = Path(filename)
    if _TORCH in path.parents:
        return False
    return _PACKAGE not in path.resolve().parents or path.parent.name == "masks"


def _spot(filename: str, line: int) -> str:
    text = linecache.getline(filename, line).strip()
    return f"{Path(filename).name}:{line}" + (f" `{text}`" if text else "")


def defined_at(mod: Any) -> str:
    """Where a mod is written: its function, or the method of its class."""
    mod = getattr(mod, "mod", mod)
    code = getattr(mod, "__code__", None) or getattr(type(mod).__call__, "__code__", None)
    return "its body" if code is None else _spot(code.co_filename, code.co_firstlineno)


def where_in_traceback(error: BaseException) -> str | None:
    spot, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        # A frozen dataclass refuses in code that it has written itself.
        written = code.co_filename == "<string>" and code.co_name.startswith("__")
        if is_users(code.co_filename) and not written:
            spot = _spot(step.tb_frame.f_code.co_filename, step.tb_lineno)
        step = step.tb_next
    return spot
