"""``flexsparse list``: what a configuration can name, and which backends run here."""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin

import typer

if TYPE_CHECKING:
    from flexsparse.backends import Backend


def list_() -> int:
    """List what a configuration can name, with the arguments each takes, and which backends run here."""
    from flexsparse.resolve import Kind, gallery

    kinds: list[tuple[Kind, str]] = [
        ("rule", "Rules"), ("score", "Scores"), ("selector", "Selectors")
    ]  # fmt: skip
    for kind, title in kinds:
        typer.echo(title)
        for name, found in gallery(kind).items():
            module = sys.modules[found.__module__].__doc__ or ""
            typer.echo(f"  {name:16} {module.strip().splitlines()[0]}")
            if takes := _takes(found):
                typer.echo(f"  {'':16} {{{name}: {{{takes}}}}}")
    typer.echo("Rules compose: {and: [rule, …]}, {or: [rule, …]}, {not: rule}; scores: [score, …]")
    typer.echo("Your own: ./file.py:Name or my_lab.rules:Name, in quotes before arguments:")
    typer.echo('  {"./file.py:Name": {argument: value}}')
    typer.echo("Backends")
    from flexsparse.choice import BACKENDS

    for backend in BACKENDS.values():
        typer.echo(f"  {backend.name:16} {_runs(backend)}")
    return 0


def _takes(found: type) -> str:
    """``size: int, seed: int = 0``; a tensor is written as a list."""
    from flexsparse.experiment.build import hints, parameters
    from flexsparse.experiment.source import shown

    types = hints(found)
    told = []
    for name, parameter in parameters(found).items():
        given = types.get(name)
        kind = _in_words(given) if given is not None else "value"
        default = "" if parameter.default is parameter.empty else f" = {shown(parameter.default)}"
        told.append(f"{name}: {kind}{default}")
    return ", ".join(told)


def _in_words(hint: Any) -> str:
    from flexsparse.resolve import kind_of

    inner: tuple[Any, ...] = getattr(hint, "__args__", ())
    if get_origin(hint) is tuple:
        return "list" if get_args(inner[0]) else f"list of {_in_words(inner[0])}s"
    if is_dataclass(hint) and kind_of(hint) is None:
        return f"{{{', '.join(field.name for field in fields(hint))}}}"
    if inner:
        return " or ".join(
            dict.fromkeys(one if isinstance(one, str) else _in_words(one) for one in inner)
        )
    words = {"Tensor": "list", "NoneType": "null", "str": "text", "MaskRule": "rule"}
    name = getattr(hint, "__name__", str(hint))
    return words.get(name, name)


def _runs(backend: Backend) -> str:
    """What a backend does on this machine's device, and why not the rest."""
    import torch

    from flexsparse.address import Identity
    from flexsparse.backends import Call
    from flexsparse.program import MaskProgram, Member

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # One that selects blocks, as every backend can.
    program = MaskProgram(Identity(1, 1), "none", None, Member(1, 1, 64, 64, one_row=True), None)
    asked = {"forward": (False, False), "lse": (False, True), "gradients": (True, True)}
    can: list[str] = []
    cannot: dict[str, list[str]] = {}
    for what, (grads, lse) in asked.items():
        call = Call(device, torch.bfloat16, 64, 64, 64, grads, lse, False, program, None)
        why = backend.refuses(call)
        if why is None:
            can.append(what)
        else:
            cannot.setdefault(why, []).append(what)
    said = [f"{', '.join(can) or 'nothing'} on {device.type}"]
    return "; ".join([*said, *(f"no {', '.join(what)}: {why}" for why, what in cannot.items())])
