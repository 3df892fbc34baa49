"""Positions of an image or a video as coordinates: row-major, the last axis fastest."""

from __future__ import annotations

from torch import Tensor


def coordinates(position: Tensor, canvas: tuple[int, ...]) -> list[Tensor]:
    """One coordinate an axis. Past the canvas, only the first lies outside its axis.

    >>> import torch
    >>> [c.tolist() for c in coordinates(torch.arange(6), (2, 3))]
    [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    """
    found: list[Tensor] = []
    for length in canvas[:0:-1]:
        found.insert(0, position % length)
        position = position // length
    found.insert(0, position)
    return found


def in_shifted_window(at: Tensor, key: Tensor, size: int, length: int | Tensor) -> Tensor:
    """Whether ``key`` is among the ``size`` coordinates around ``at``, on an axis of ``length``.

    Near a border the window is moved inside, so that it always has its size; an even one reaches
    farther back than ahead.

    >>> import torch
    >>> at = torch.arange(5)
    >>> in_shifted_window(at[:, None], at, 3, 5).int().tolist()
    [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]
    """
    first = (at - size // 2).clamp(min=0).clamp(max=length - size)
    return (key >= first) & (key < first + size)
