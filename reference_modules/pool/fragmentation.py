"""Fragmentation as four numbers, because no single one tells waste inside blocks from blocks that nobody can
use.
"""

from __future__ import annotations

from typing import TypedDict


class Fragmentation(TypedDict):
    """What of the pool's memory is lost, and how (docs/pool.md defines each number with an example)."""

    internal: float
    """1 − requested / block bytes, over every lease that a block ever served."""
    reserve_overhead: float
    """1 − peak bytes in use / peak bytes reserved."""
    external: float | None
    """1 − largest free / total free; None, because separate blocks cannot merge and the number would mean
    nothing.
    """
    refusals: int
    """Requests that were refused or left to plain torch while at least that many bytes were free."""


def fragmentation(
    *, requested: int, served: int, peak_in_use: int, peak_reserved: int, refusals: int
) -> Fragmentation:
    """The four numbers; a pool that served nothing wastes nothing."""
    return Fragmentation(
        internal=_lost(requested, served),
        reserve_overhead=_lost(peak_in_use, peak_reserved),
        external=None,
        refusals=refusals,
    )


def _lost(used: int, held: int) -> float:
    return 1.0 - used / held if held else 0.0
