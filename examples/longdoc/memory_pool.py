"""Tensors that are used again: one list of idle blocks per size and dtype."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor


class PoolExhausted(RuntimeError):
    """The pool may not grow any further."""


class TensorMemoryPool:
    """Hands out tensors and takes them back; every `allocate` owes one `deallocate`."""

    def __init__(self, device: str | torch.device = "cpu", max_bytes: int | None = None) -> None:
        self.device = torch.device(device)
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._out: dict[int, tuple[Tensor, Tensor]] = {}
        self._reserved = 0

    @property
    def allocated_gb(self) -> float:
        return self._reserved / 2**30

    @property
    def outstanding(self) -> int:
        return len(self._out)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is out on loan from this pool."""
        return id(tensor) in self._out

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, zero: bool = False
    ) -> Tensor:
        """A tensor of this shape, uncleared unless `zero`. Raises PoolExhausted at the limit."""
        size = prod(shape)
        with self._lock:
            idle = self._idle[size, dtype]
            block = idle.pop() if idle else self._reserve(size, dtype)
            tensor = block.view(tuple(shape))
            self._out[id(tensor)] = (tensor, block)
        return tensor.zero_() if zero else tensor

    def try_allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Like `allocate`, but None at the limit."""
        try:
            return self.allocate(shape, dtype)
        except PoolExhausted:
            return None

    def deallocate(self, tensor: Tensor) -> None:
        with self._lock:
            entry = self._out.pop(id(tensor), None)
            if entry is None:
                raise KeyError(f"a tensor of shape {tuple(tensor.shape)} is not out on loan from this pool")
            block = entry[1]
            self._idle[block.numel(), block.dtype].append(block)

    @contextmanager
    def lease(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, zero: bool = False
    ) -> Iterator[Tensor]:
        tensor = self.allocate(shape, dtype, zero=zero)
        try:
            yield tensor
        finally:
            self.deallocate(tensor)

    def trim(self) -> None:
        """Let go of every idle block."""
        with self._lock:
            self._reserved -= sum(b.numel() * b.element_size() for idle in self._idle.values() for b in idle)
            self._idle.clear()

    def _reserve(self, size: int, dtype: torch.dtype) -> Tensor:
        wanted = size * dtype.itemsize
        if self.max_bytes is not None and self._reserved + wanted > self.max_bytes:
            raise PoolExhausted(f"{wanted} bytes more than {self._reserved} would pass {self.max_bytes}")
        self._reserved += wanted
        return torch.empty(size, dtype=dtype, device=self.device)


_pools: dict[torch.device, TensorMemoryPool] = {}


def get_memory_pool(device: str | torch.device = "cpu") -> TensorMemoryPool:
    """The pool that everything on one device shares."""
    key = torch.device(device)
    if key not in _pools:
        _pools[key] = TensorMemoryPool(key)
    return _pools[key]
