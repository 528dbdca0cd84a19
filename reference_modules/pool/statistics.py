"""The pool's figures: counters that change under the pool's lock, and the frozen copy a caller gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference_modules.pool.stores import Store


@dataclass(frozen=True)
class PoolStats:
    """One moment of a pool; every figure is exact, none is sampled."""

    leases: int
    """Allocations that had no deallocate, abandoned ones included."""
    abandoned: int
    """Those among `leases` whose tensor has died: the memory came back, the fault stays visible."""
    bytes_in_use: int
    """Requested bytes of the leases that are neither given back nor abandoned."""
    bytes_reserved: int
    """Bytes held for the pool: blocks leased, waiting or idle, and the plain memory of live bypassed leases.
    """
    peak_bytes_in_use: int
    peak_bytes_reserved: int
    hits: int
    """Allocations served by a block that had been used before."""
    misses: int
    """Allocations for which a new block was made."""
    bypassed: int
    """Allocations in plain torch memory because the pool steps aside there: below the threshold, or a size
    that never came back.
    """
    evictions: int
    """Idle blocks given back to the system: for the limit, under pressure, or by trim."""
    waiting: int
    """Blocks whose lease has ended and whose storage something still refers to."""
    fallbacks: int
    """Allocations that ended in plain torch memory because no block could be had (out of memory)."""
    refused: int
    """Allocations refused because `max_bytes` leaves no room."""


class Counters:
    """Running figures of one pool; written only under its lock, so plain integers are exact."""

    __slots__ = (
        "abandoned",
        "bypassed",
        "fallbacks",
        "in_blocks",
        "in_use",
        "peak_in_use",
        "peak_reserved",
        "refused",
        "refused_while_free",
    )

    def __init__(self) -> None:
        self.in_use = 0
        self.in_blocks = 0
        """Those of `in_use` that lie in blocks."""
        self.peak_in_use = 0
        self.peak_reserved = 0
        self.bypassed = 0
        self.fallbacks = 0
        self.abandoned = 0
        self.refused = 0
        self.refused_while_free = 0

    @property
    def plain(self) -> int:
        """Bytes of live leases that are not in blocks; they count as reserved while the lease lives."""
        return self.in_use - self.in_blocks


def read(counters: Counters, store: Store, standing: int) -> PoolStats:
    """The frozen figures of this moment."""
    return PoolStats(
        leases=standing + counters.abandoned,
        abandoned=counters.abandoned,
        bytes_in_use=counters.in_use,
        bytes_reserved=store.reserved + counters.plain,
        peak_bytes_in_use=counters.peak_in_use,
        peak_bytes_reserved=counters.peak_reserved,
        hits=store.hits,
        misses=store.misses,
        bypassed=counters.bypassed,
        evictions=store.evictions,
        waiting=store.waiting,
        fallbacks=counters.fallbacks,
        refused=counters.refused,
    )
