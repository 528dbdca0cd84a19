"""A pool of the contract's shape that counts what is out, and fails at the k-th lease when told to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class CountingPool:
    def __init__(self, fail_at: int | None = None) -> None:
        self.outstanding = 0
        self.taken = 0
        self.largest = 0
        self.fail_at = fail_at

    @contextmanager
    def lease(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        *,
        zero: bool = False,
    ) -> Iterator[Tensor]:
        if self.taken == self.fail_at:
            raise MemoryError("the pool was told to refuse")
        self.taken += 1
        self.outstanding += 1
        leased = torch.full(
            tuple(shape), float("nan") if dtype.is_floating_point else 1, dtype=dtype, device=device
        )
        self.largest = max(self.largest, leased.nbytes)
        try:
            yield leased.zero_() if zero else leased
        finally:
            self.outstanding -= 1
