"""Temporaries of one call: from the pool where there is one, plain torch memory where not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


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
