"""What a module inherits to take its temporaries from the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .memory_pool import TensorMemoryPool, get_memory_pool

MIN_ELEMENTS = 1 << 12


class MemoryPoolMixin:
    """Pool or plain torch memory, by a switch; small tensors are never pooled."""

    _pool: TensorMemoryPool | None

    def _init_memory_pool(
        self, enable_memory_pool: bool = False, pool: TensorMemoryPool | None = None
    ) -> None:
        self._pool = (pool or get_memory_pool()) if enable_memory_pool else None

    def _allocate_tensor(self, shape: Sequence[int], dtype: torch.dtype, *, zero: bool = False) -> Tensor:
        if self._pool is None or torch.Size(shape).numel() < MIN_ELEMENTS:
            return torch.zeros(shape, dtype=dtype) if zero else torch.empty(shape, dtype=dtype)
        return self._pool.allocate(shape, dtype, zero=zero)

    def _deallocate_tensor(self, tensor: Tensor) -> None:
        if self._pool is not None and self._pool.owns(tensor):
            self._pool.deallocate(tensor)

    @contextmanager
    def _lease_tensor(
        self, shape: Sequence[int], dtype: torch.dtype, *, zero: bool = False
    ) -> Iterator[Tensor]:
        tensor = self._allocate_tensor(shape, dtype, zero=zero)
        try:
            yield tensor
        finally:
            self._deallocate_tensor(tensor)
