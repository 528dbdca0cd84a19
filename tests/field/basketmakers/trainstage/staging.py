"""Staging tensors cached by shape, with a byte meter."""
from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import Iterator, Optional

import torch


class StageCache:
    def __init__(self, device: str = "cuda", limit: int = 1 << 32):
        self.device = device
        self.limit = limit
        self.bytes_out = 0
        self._rack: dict[tuple, list[torch.Tensor]] = defaultdict(list)

    def pull(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        rack = self._rack[shape, dtype]
        t = rack.pop() if rack else torch.empty(shape, dtype=dtype, device=self.device)  # clean: metered and returned to the caller
        self.bytes_out += t.nbytes
        return t

    def pull_capped(self, shape: tuple[int, ...], dtype: torch.dtype) -> Optional[torch.Tensor]:
        t = self.pull(shape, dtype)  # leak: over the limit it returns None and the tensor is not racked
        if self.bytes_out > self.limit:
            return None
        return t

    def rack(self, t: torch.Tensor) -> None:
        self.bytes_out -= t.nbytes
        self._rack[tuple(t.shape), t.dtype].append(t)

    @contextmanager
    def pulled(self, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        t = self.pull(shape, dtype)  # clean: racked in finally
        try:
            yield t
        finally:
            self.rack(t)


STAGE = StageCache()
