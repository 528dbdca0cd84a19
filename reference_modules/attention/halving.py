"""A kernel call that does not fit in memory is tried again in halves, with a warning.

What was already added stays added, because a tile adds its result only after all of it has been computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol, Self, TypeVar

import torch


class Divisible(Protocol):
    """Work that may be done in two parts instead."""

    def halves(self) -> list[Self]:
        """None where it cannot be divided."""
        ...

    def described(self) -> str:
        """What and how much it is."""
        ...


D = TypeVar("D", bound=Divisible)


def in_halves_if_needed(tile: D, run: Callable[[D], None], *, allowed: bool = True) -> None:
    """`run` on the tile, or where memory runs out on ever smaller parts of it.

    `allowed=False` is for the dropout of chosen blocks, which a part would draw otherwise than the whole.
    """
    waiting = [tile]
    while waiting:
        part = waiting.pop()
        if allowed:
            waiting.extend(reversed(_what_is_left(part, run)))
        else:
            run(part)


def _what_is_left(part: D, run: Callable[[D], None]) -> list[D]:
    """Nothing, or the halves of what ran out of memory; handed out after the except, when all is freed."""
    try:
        run(part)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error) or not (halves := part.halves()):
            raise
        say_so(part, "halves")
    else:
        return []
    return halves


def say_so(tile: Divisible, what: str) -> None:
    """That a step goes on, but slower."""
    warnings.warn(
        f"out of memory on {tile.described()}: going on in {what}, which is slower; "
        "use shorter segments, smaller batches or more ranks to avoid it",
        RuntimeWarning,
        stacklevel=3,
    )


def ran_out_of_memory(run: Callable[[], None]) -> bool:
    """Whether `run` failed for want of memory; its caller goes on outside the except, when all is freed."""
    try:
        run()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return True
    return False


def _is_out_of_memory(error: BaseException) -> bool:
    """torch's CPU allocator raises a bare RuntimeError, so only its text tells."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
