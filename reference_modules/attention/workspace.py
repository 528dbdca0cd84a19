"""Temporaries of one call: from the pool where there is one, plain torch memory where not."""

from __future__ import annotations

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
