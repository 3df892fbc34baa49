"""The box: its ceilings, where time goes on it, and how code is compiled for it."""

from flexsparse.device.ceiling import Ceilings, ceilings
from flexsparse.device.compiling import CompileCounter, compiles
from flexsparse.device.heard import Raised
from flexsparse.device.lasting import lasting
from flexsparse.device.precision import autocast_dtype, without_autocast
from flexsparse.device.specialising import compiled_alone
from flexsparse.device.stages import Stages
from flexsparse.device.tangents import has_tangent, tangents_there

__all__ = [
    "Ceilings",
    "CompileCounter",
    "Raised",
    "Stages",
    "autocast_dtype",
    "ceilings",
    "compiled_alone",
    "compiles",
    "has_tangent",
    "lasting",
    "tangents_there",
    "without_autocast",
]
