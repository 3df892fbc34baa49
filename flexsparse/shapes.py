"""Axis letters bound to tensors at the door, so that later code can rely on them."""

from __future__ import annotations

import torch
from torch import Tensor

from flexsparse.errors import ArgumentError, ShapeError


def axes(**tensors: tuple[Tensor, str]) -> dict[str, int]:
    """Binds each letter of ``name=(tensor, "b h q d")`` to one length, the same in every tensor.

    >>> import torch
    >>> axes(q=(torch.zeros(2, 4, 8), "b q d"), k=(torch.zeros(2, 6, 8), "b k d"))
    {'b': 2, 'q': 4, 'd': 8, 'k': 6}
    """
    bound: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (tensor, letters) in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{name} must be a tensor [{letters}], got {type(tensor).__name__}")
        wanted = letters.split()
        if tensor.ndim != len(wanted):
            raise ShapeError(
                f"{name} must have {len(wanted)} axes [{letters}], got shape {list(tensor.shape)}"
            )
        for letter, length in zip(wanted, tensor.shape, strict=True):
            if bound.setdefault(letter, length) != length:
                raise ShapeError(
                    f"axis '{letter}' is {bound[letter]} in {owner[letter]} but {length} in {name} "
                    f"(shape {list(tensor.shape)})"
                )
            owner.setdefault(letter, name)
    return bound


def ceil_div(length: int, block: int) -> int:
    return -(-length // block)


def next_power_of_two(length: int) -> int:
    """The smallest power of two that is no less.

    >>> [next_power_of_two(n) for n in (1, 2, 3, 200)]
    [1, 2, 4, 256]
    """
    return 1 << (length - 1).bit_length()


def common_multiple(a: int, b: int) -> int:
    """The least common multiple, also of lengths that torch.compile leaves open, as math.lcm is not.

    >>> common_multiple(16, 6)
    48
    """
    found = a
    while found % b:
        found += a
    return found


def settled_number(n: int) -> int:
    """``n``, of which inside torch.compile each value is compiled by itself: there torch may take a number
    for one that varies, and no kernel is made for that."""
    return len(range(n)) if torch.compiler.is_compiling() else n
