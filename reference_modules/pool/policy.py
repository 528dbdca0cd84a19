"""Where an allocation comes from: a block, plain torch memory, or nowhere because the limit says so."""

from __future__ import annotations

import torch

from reference_modules.pool import complaints
from reference_modules.pool.blocks import Signal
from reference_modules.pool.errors import NoRoom, PoolError
from reference_modules.pool.ledger import Ledger
from reference_modules.pool.settings import Settings
from reference_modules.pool.uncleared import memory_is_out_of_reach

OUT_OF_MEMORY = (MemoryError, OSError, torch.OutOfMemoryError)

Obtained = tuple[torch.Tensor, Signal | None, bool]
"""The tensor, the signal of its block's storage if a block serves it, and whether it already reads as zeros.
"""


class Policy:
    """Decides for one pool; runs under its lock, and either obtains a tensor or holds nothing."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings = settings
        self._store = ledger.store
        self._counters = ledger.counters

    def obtain(
        self, sizes: tuple[int, ...], dtype: torch.dtype, nbytes: int, pooled: bool, zero: bool
    ) -> Obtained:
        """A tensor of this shape: from a block if `pooled` and the pool has reason to, else plain."""
        max_bytes, counters = self._settings.max_bytes, self._counters
        limit = None if max_bytes is None else max_bytes - counters.plain
        if not (pooled and nbytes and self._worth(nbytes)) or memory_is_out_of_reach():
            tensor = self._plain(sizes, dtype, nbytes, limit, zero)
            counters.bypassed += 1
            return tensor, None, zero
        try:
            tensor, signal = self._drawn(sizes, dtype, nbytes, limit)
        except NoRoom:
            raise self._refusal(nbytes, limit) from None
        except OUT_OF_MEMORY:
            tensor = self._plain(sizes, dtype, nbytes, limit, zero)
            counters.fallbacks += 1
            return tensor, None, zero
        return tensor, signal, signal is not None and signal.block.fresh

    def _drawn(
        self, sizes: tuple[int, ...], dtype: torch.dtype, nbytes: int, limit: int | None
    ) -> tuple[torch.Tensor, Signal | None]:
        store = self._store
        try:
            return store.draw(nbytes, sizes, dtype, limit)
        except OUT_OF_MEMORY:
            if store.idle_bytes >= nbytes:
                self._counters.refused_while_free += 1
            store.evict(store.idle_bytes)
        return store.draw(
            nbytes, sizes, dtype, limit
        )  # outside the except: its traceback would keep memory alive

    def _plain(
        self, sizes: tuple[int, ...], dtype: torch.dtype, nbytes: int, limit: int | None, zero: bool
    ) -> torch.Tensor:
        if limit is not None and self._store.reserved + nbytes > limit:
            self._store.evict(self._store.reserved + nbytes - limit)
            if self._store.reserved + nbytes > limit:
                raise self._refusal(nbytes, limit)
        make = torch.zeros if zero else torch.empty
        return make(sizes, dtype=dtype, device=self._settings.device)

    def _worth(self, nbytes: int) -> bool:
        """A threshold that somebody set is obeyed; a measured one is corrected by what the pool sees."""
        return self._settings.threshold_mb is not None or self._store.worth_pooling(nbytes)

    def _refusal(self, nbytes: int, limit: int | None) -> PoolError:
        counters = self._counters
        counters.refused += 1
        if limit is not None and limit - self._store.reserved >= nbytes:
            counters.refused_while_free += 1
        return complaints.no_room(
            self._settings.name, nbytes, self._settings.max_bytes or 0, counters.in_use, self._store.waiting
        )
