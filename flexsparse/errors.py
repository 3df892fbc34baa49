"""The errors a user can meet: one family, each one sentence that says what was given and what to do."""

from __future__ import annotations

from typing import Any


class FlexSparseError(Exception):
    """Root of the family."""


class ArgumentError(FlexSparseError, TypeError):
    """An argument of the wrong kind, such as a raw tensor where a Selection belongs."""


class ShapeError(FlexSparseError, ValueError):
    """Tensors whose shapes, dtypes, devices or lengths do not fit together."""


class RuleError(FlexSparseError, TypeError):
    """A rule that cannot be fused into a kernel, or stands in the wrong slot."""


class SelectionError(FlexSparseError, ValueError):
    """Candidate indices that break their contract."""


class LayoutError(FlexSparseError, ValueError):
    """A layout that cannot be built, or does not belong to the plan that runs it."""


class EmptyRowError(LayoutError):
    """A query with nothing to see, under ``empty="error"``."""


class BackendError(FlexSparseError, ValueError):
    """A backend that cannot do what was asked of it."""


class CompileError(FlexSparseError, RuntimeError):
    """torch could not compile a kernel; names the rule, and carries torch's error as its cause."""


class ConfigError(FlexSparseError, ValueError):
    """A configuration file or override that cannot be used."""


def check_number(owner: str, field: str, value: object, kind: type, least: float) -> None:
    """Refuses a parameter of the gallery that is no number, or too small; a 0-d tensor is one."""
    if getattr(value, "ndim", None) == 0:
        return
    name = "an int" if kind is int else "a number"
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted):
        shape = getattr(value, "shape", None)
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        given = repr(value) if shape is None else f"{dtype}{list(shape)}"
        raise ArgumentError(f"{owner} {field} must be {name}, got {given}")
    if value < least:
        raise ArgumentError(f"{owner} {field} must be at least {least:g}, got {value}")


def check_per_head(owner: str, field: str, value: Any, kind: type, least: float) -> None:
    """Refuses what is neither a number nor a tensor ``[Hq]`` of numbers, or is too small."""
    if getattr(value, "ndim", 0) == 0:
        check_number(owner, field, value, kind, least)
        return
    check_table(owner, field, value, "int" if kind is int else "float", "[Hq]")
    if bool((value < least).any()):
        lowest = value.detach().min().item()
        raise ArgumentError(f"{owner} {field} must be at least {least:g}, got {lowest}")


def check_table(owner: str, field: str, value: Any, kind: str, *forms: str) -> None:
    """Refuses a table of the gallery that is no bool, int or float tensor of one of ``forms``.

    >>> check_table("Tree", "start", 3.5, "int", "[B]", "[B, N]")
    Traceback (most recent call last):
        ...
    flexsparse.errors.ArgumentError: Tree start must be an int tensor [B] or [B, N], got the float 3.5
    """
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    shape = getattr(value, "shape", None)
    kinds = {"bool": ("bool",), "int": ("int32", "int64")}
    right = dtype in kinds[kind] if kind in kinds else "float" in dtype
    if shape is None or not right or len(shape) not in [form.count(",") + 1 for form in forms]:
        given = (
            f"{value.dtype}{list(shape)}"
            if shape is not None
            else f"the {type(value).__name__} {_short(value)}"
        )
        article = "an" if kind == "int" else "a"
        raise ArgumentError(
            f"{owner} {field} must be {article} {kind} tensor {' or '.join(forms)}, got {given}"
        )


def check_lengths(owner: str, field: str, value: object, least: int, axes: int | None) -> None:
    """Refuses what is no tuple of ints, one an axis of the canvas; ``axes`` None takes 1 to 3."""
    lengths = value if isinstance(value, tuple) and all(type(n) is int for n in value) else ()
    if len(lengths) not in ((1, 2, 3) if axes is None else (axes,)):
        many = "1 to 3 ints" if axes is None else f"{axes} int{'s' * (axes > 1)}"
        raise ArgumentError(
            f"{owner} {field} must be a tuple of {many}, one an axis, got {_short(value)}"
        )
    if min(lengths) < least:
        raise ArgumentError(
            f"{owner} {field} must be at least {least} along each axis, got {value}"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}..."


class CheckFailed(FlexSparseError, AssertionError):
    """A result that differs from the reference by more than its error budget."""
