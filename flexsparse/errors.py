"""The errors a user can meet: one family, each one sentence that says what was given and what to do."""


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


class CheckFailed(FlexSparseError, AssertionError):
    """A result that differs from the reference by more than its error budget."""
