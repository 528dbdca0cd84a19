"""A kernel call that does not fit in memory is tried again in halves, with a warning.

What was already added stays added, because a tile adds its result only after all of it has been computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from reference_modules.attention.geometry import Tile


def in_halves_if_needed(tile: Tile, run: Callable[[Tile], None], *, allowed: bool = True) -> None:
    """`run` on the tile, or where memory runs out on ever smaller parts of it.

    `allowed=False` is for dropout: parts would draw other masks than the whole does in the other pass.
    """
    waiting = [tile]
    while waiting:
        part = waiting.pop()
        halves = part.halves() if allowed else []
        if not halves:
            run(part)
        elif ran_out_of_memory(lambda: run(part)):  # noqa: B023, it is called at once
            say_so(part, "halves")
            waiting.extend(reversed(halves))


def say_so(tile: Tile, what: str) -> None:
    """That a step goes on, but slower."""
    warnings.warn(
        f"out of memory on {tile.segments} segments of {tile.heads} heads and {tile.q_rows} rows: "
        f"going on in {what}, which is slower; "
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
