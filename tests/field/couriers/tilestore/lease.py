"""Leases bind a slot to the place that has to give it back."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import torch

from .pool import TilePool


class TileLease:
    def __init__(self, pool: TilePool, slot: int, zoom: int) -> None:
        self.pool = pool
        self.slot = slot
        self.zoom = zoom
        self.live = True

    @property
    def pixels(self) -> torch.Tensor:
        return self.pool.pixels(self.slot)

    def release(self) -> None:
        if self.live:
            self.live = False
            self.pool.dealloc(self.slot, self.zoom)

    def __enter__(self) -> "TileLease":
        return self

    def __exit__(self, *exc) -> None:
        self.release()


def acquire(pool: TilePool, zoom: int) -> TileLease | None:
    slot = pool.alloc(zoom)  # clean: wrapped in the lease and returned
    if slot < 0:
        return None
    return TileLease(pool, slot, zoom)


def acquire_quota(pool: TilePool, zoom: int, quota: int) -> TileLease | None:
    slot = pool.alloc(zoom)  # leak: over the quota it returns None without dealloc
    if slot < 0:
        return None
    if pool.load(zoom) > quota:
        return None
    return TileLease(pool, slot, zoom)


@contextmanager
def leased(pool: TilePool, zoom: int) -> Iterator[torch.Tensor]:
    lease = acquire(pool, zoom)  # clean: released in finally
    if lease is None:
        raise MemoryError("tile pool is full")
    try:
        yield lease.pixels
    finally:
        lease.release()
