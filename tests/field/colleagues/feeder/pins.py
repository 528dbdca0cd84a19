"""Pinned batch buffers: base class, size buckets and a counting mixin."""
from __future__ import annotations

import abc
import threading
from typing import Optional

import torch

class BufferSource(abc.ABC):
    @abc.abstractmethod
    def _pick(self, n: int) -> Optional[torch.Tensor]: ...
    @abc.abstractmethod
    def _lay(self, t: torch.Tensor) -> None: ...
    def checkout(self, n: int) -> Optional[torch.Tensor]:
        return self._pick(n)  # clean: handed to the caller
    def putback(self, t: torch.Tensor) -> None:
        self._lay(t)

class CountingMixin:
    """Refuses more than `limit` buffers out."""

    limit = 64
    def __init__(self, *a, **kw) -> None:
        super().__init__(*a, **kw)
        self.out = 0
    def checkout(self, n: int) -> Optional[torch.Tensor]:
        t = super().checkout(n)  # leak: over the limit drops the buffer just taken
        if t is None or self.out >= self.limit:
            return None
        self.out += 1
        return t
    def putback(self, t: torch.Tensor) -> None:
        self.out -= 1
        super().putback(t)

class BucketSource(BufferSource):
    def __init__(self, buckets: tuple[int, ...], each: int) -> None:
        self.mu = threading.Lock()
        self.by_size = {b: [torch.empty(b, pin_memory=True) for _ in range(each)] for b in buckets}
    def _pick(self, n: int) -> Optional[torch.Tensor]:
        with self.mu:
            for size in sorted(self.by_size):
                if size >= n and self.by_size[size]:
                    return self.by_size[size].pop()
        return None
    def _lay(self, t: torch.Tensor) -> None:
        with self.mu:
            self.by_size[t.numel()].append(t)

class CountedBuckets(CountingMixin, BucketSource):
    pass
