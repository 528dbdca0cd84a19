"""Temporaries of one call: from the pool where there is one, plain torch memory where not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from reference_modules.mixin import MemoryPoolMixin


class Pool(Protocol):
    """As much of reference_modules.pool.TensorPool as attention asks for."""

    def lease(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = ...,
        device: torch.device | None = ...,
        *,
        zero: bool = ...,
    ) -> AbstractContextManager[Tensor]: ...


class Scratch:
    """Lends the buffers of one call on CPU again, tile after tile, where there is no pool.

    Memory that the C allocator maps anew costs more to touch first (0.35 ms a megabyte, measured) than packed
    operands save.
    """

    def __init__(self) -> None:
        self._idle: list[Tensor] = []

    @contextmanager
    def lease(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        *,
        zero: bool = False,
    ) -> Iterator[Tensor]:
        """One that lies idle if it has that size and type; all others that do are let go."""
        flat = self._take(math.prod(shape), dtype, device)
        try:
            yield (flat.zero_() if zero else flat).view(tuple(shape))
        finally:
            self._idle.append(flat)

    def _take(self, size: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
        """Sizes change with the branch, and when memory was short: then what is too large must go first."""
        self._idle = [flat for flat in self._idle if flat.dtype == dtype and flat.numel() == size]
        return self._idle.pop() if self._idle else torch.empty(size, dtype=dtype, device=device)


def scratch_for(pool: Pool | None, like: Tensor) -> Pool | None:
    """What a call takes its temporaries from; CUDA's allocator reuses memory by itself."""
    return Scratch() if pool is None and like.device.type == "cpu" else pool


@contextmanager
def temporary(
    pool: Pool | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, zero: bool = False
) -> Iterator[Tensor]:
    """A tensor for the length of a `with` block."""
    if pool is None:
        yield (torch.zeros if zero else torch.empty)(tuple(shape), dtype=dtype, device=device)
        return
    with pool.lease(tuple(shape), dtype, device, zero=zero) as leased:
        yield leased


@contextmanager
def accumulator(
    like: Tensor, dtype: torch.dtype, pool: Pool | None, *, zero: bool = True
) -> Iterator[Tensor]:
    """A sum shaped like `like`; from the pool only where it is cast later, else it leaves the call."""
    if dtype == like.dtype:
        yield (torch.zeros_like if zero else torch.empty_like)(like, memory_format=torch.contiguous_format)
        return
    with temporary(pool, like.shape, dtype, like.device, zero=zero) as total:
        yield total


class ModulePool:
    """A pooled module's temporaries as a Pool: its own threshold and its own pool apply."""

    def __init__(self, module: MemoryPoolMixin) -> None:
        self._module = module

    @contextmanager
    def lease(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        *,
        zero: bool = False,
    ) -> Iterator[Tensor]:
        """Through the module, so that its `get_memory_info` and cleanup know of it."""
        with self._module._lease_tensor(shape, dtype, device, zero_init=zero) as leased:
            yield leased


def pool_of(module: MemoryPoolMixin) -> Pool | None:
    """None where the module's switch is off."""
    return ModulePool(module) if module.enable_memory_pool else None
