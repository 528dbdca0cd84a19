"""The native store: limits, accounting and policy over the CUDA caching allocator, which is a pool already.

Buckets of our own fragment worse than it does (design: 54 % to 98 % against 1.1 % with expandable segments),
so no block is kept here. Where expandable segments are on, allocations go to the shared allocator: they merge
there, and a MemPool beside them is refused by some torch versions. Else a `torch.cuda.MemPool` keeps our
varying sizes away from everybody else's segments. Stream order is the caching allocator's: memory returns to
the stream it was allocated on, `tensor.record_stream` says who else uses it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from reference_modules.pool.blocks import Signal
from reference_modules.pool.errors import NoRoom, PoolError

SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def expandable_segments() -> bool:
    """Whether the environment asks torch's allocator for expandable segments."""
    settings = ",".join(os.environ.get(name, "") for name in SETTINGS).replace(" ", "")
    return "expandable_segments:True" in settings


class NativeStore:
    """Draws from the device's allocator, holds nothing. `cuda` is torch.cuda, or a stand-in in tests."""

    waiting = 0
    hits = 0
    misses = 0

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self._device = device
        self._cuda = cuda or torch.cuda
        self._made_in = os.getpid()
        self._separate = None
        if (
            not expandable_segments()
            and hasattr(self._cuda, "MemPool")
            and hasattr(self._cuda, "use_mem_pool")
        ):
            self._separate = self._cuda.MemPool()
        self.evictions = 0

    @property
    def adds_nothing(self) -> bool:
        """In the shared allocator a lease is an entry in our books: 10 µs of policy would change nothing."""
        return self._separate is None and os.getpid() == self._made_in

    @property
    def reserved(self) -> int:
        """Nothing beyond the live leases: what the allocator caches is its own and serves everybody."""
        return 0

    @property
    def idle_bytes(self) -> int:
        """What the allocator caches on this device, whoever freed it; `evict` can give that back."""
        cached = self._cuda.memory_reserved(self._device) - self._cuda.memory_allocated(self._device)
        return max(0, int(cached))

    def draw(
        self, nbytes: int, shape: Sequence[int], dtype: torch.dtype, limit: int | None
    ) -> tuple[torch.Tensor, Signal | None]:
        """A tensor from the device's allocator; NoRoom beyond `limit`, torch.OutOfMemoryError where the
        device is full.
        """
        if os.getpid() != self._made_in:
            raise PoolError(
                "CUDA cannot be used in a forked child; start processes with 'spawn', and make the pool there"
            )
        if limit is not None and nbytes > limit:
            raise NoRoom
        with self._routed():
            return torch.empty(shape, dtype=dtype, device=self._device), None

    def _routed(self) -> AbstractContextManager[object]:
        if self._separate is None:
            return nullcontext()
        routed: AbstractContextManager[object] = self._cuda.use_mem_pool(self._separate, self._device)
        return routed

    def part(self, signal: Signal) -> None:
        """No lease of this store has a signal."""

    def settle(self) -> None:
        """Nothing comes back here: the allocator takes its memory itself."""

    def evict(self, nbytes: int) -> int:
        """Let the allocator give its cached memory back; all of it, since it cannot give a part."""
        if nbytes <= 0:
            return 0
        before = self._cuda.memory_reserved(self._device)
        with self._cuda.device(self._device):
            self._cuda.empty_cache()
        gone = int(before - self._cuda.memory_reserved(self._device))
        self.evictions += gone > 0
        return gone

    def evict_older(self, moment: float, most: int) -> int:
        """The allocator does not say how long memory has been idle, so nothing goes by age."""
        return 0

    def under_pressure(self) -> int:
        """Bytes by which the device's free memory has fallen under a twentieth of it."""
        free, total = self._cuda.mem_get_info(self._device)
        return max(0, int(total) // 20 - int(free))

    def worth_pooling(self, nbytes: int) -> bool:
        """Always: it costs nothing to route an allocation."""
        return True

    def abandon(self) -> None:
        """Drop our segments; the allocator frees them when their last tensor has died."""
        self._separate = None

    def fit(self) -> tuple[int, int]:
        """The allocator's blocks are its own."""
        return 0, 0

    def report(self) -> list[dict[str, float]]:
        """No size classes here."""
        return []

    def reset_after_fork(self) -> None:
        """`draw` refuses by the process id: CUDA does not survive a fork."""
        self._separate = None
