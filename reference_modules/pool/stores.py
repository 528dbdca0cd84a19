"""What a pool needs from the memory beneath it; two kinds: blocks of our own (`lease`), the device's
allocator (`native`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from reference_modules.pool.blocks import Signal
from reference_modules.pool.native import NativeStore
from reference_modules.pool.store import BlockStore


class Store(Protocol):
    """Every method runs under the pool's lock."""

    @property
    def reserved(self) -> int:
        """Bytes held beyond those of live plain leases."""

    @property
    def idle_bytes(self) -> int:
        """Bytes that `evict` could give back."""

    @property
    def waiting(self) -> int:
        """Blocks whose lease is over and whose storage is not."""

    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def evictions(self) -> int: ...

    @property
    def adds_nothing(self) -> bool:
        """Whether plain torch memory serves just as well, so that only leases need be kept."""

    def draw(
        self, nbytes: int, shape: Sequence[int], dtype: torch.dtype, limit: int | None
    ) -> tuple[torch.Tensor, Signal | None]:
        """A tensor, and the signal of its storage where a block of ours lies under it."""

    def part(self, signal: Signal) -> None:
        """The lease over this storage is over."""

    def settle(self) -> None:
        """Take in what has come back."""

    def evict(self, nbytes: int) -> int:
        """Give back at least this many idle bytes, as far as there are; returns how many went."""

    def evict_older(self, moment: float, most: int) -> int:
        """Give back what has been idle since before this moment, at most about `most` bytes."""

    def under_pressure(self) -> int:
        """Bytes the device is short of."""

    def worth_pooling(self, nbytes: int) -> bool:
        """Whether pooling this size has paid so far."""

    def abandon(self) -> None:
        """Forget everything; what is still referred to lives on without the pool."""

    def fit(self) -> tuple[int, int]:
        """Bytes requested of blocks, and bytes of the blocks that served them."""

    def report(self) -> list[dict[str, float]]:
        """Figures by size class."""

    def reset_after_fork(self) -> None:
        """Make the store usable, or refuse, in a forked child."""


def make_store(backend: str, device: torch.device) -> Store:
    """The store that a resolved backend names."""
    return NativeStore(device) if backend == "native" else BlockStore()
