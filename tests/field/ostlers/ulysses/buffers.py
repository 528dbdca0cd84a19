"""Communication buffers: a protocol, a counted pool and a stacking view of it."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional, Protocol, Tuple

import torch

Key = Tuple[int, torch.dtype]


class BufferSource(Protocol):
    def rent(self, numel: int, dtype: torch.dtype) -> torch.Tensor: ...

    def unrent(self, buf: torch.Tensor) -> None: ...


class CommBuffers:
    """Exact-size buffers for collectives; at most `cap` bytes rented out."""

    def __init__(self, cap: int):
        self.cap = cap
        self._rented = 0
        self._stock: Dict[Key, List[torch.Tensor]] = {}
        self._room = threading.Condition()

    def rent(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size = numel * torch.finfo(dtype).bits // 8
        with self._room:
            self._room.wait_for(lambda: self._rented + size <= self.cap)
            self._rented += size
            stock = self._stock.setdefault((numel, dtype), [])
            return stock.pop() if stock else torch.empty(numel, dtype=dtype, device="cuda")

    def unrent(self, buf: torch.Tensor) -> None:
        with self._room:
            self._rented -= buf.numel() * buf.element_size()
            self._stock[(buf.numel(), buf.dtype)].append(buf)
            self._room.notify_all()


class RecyclingSource:
    """Keeps the last buffer rented through it at hand, and gives it out again when the size is the same."""

    def __init__(self, inner: BufferSource):
        self.inner = inner
        self._last: Optional[torch.Tensor] = None

    def rent(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        last, self._last = self._last, None
        if last is not None:
            if last.numel() == numel and last.dtype == dtype:
                return last
            self.inner.unrent(last)
        return self.inner.rent(numel, dtype)  # clean: returned to the caller

    def unrent(self, buf: torch.Tensor) -> None:
        if self._last is None:
            self._last = buf
        else:
            self.inner.unrent(buf)

    def flush(self) -> None:
        if self._last is not None:
            self.inner.unrent(self._last)
            self._last = None


class PingPongSource:
    """Two buffers of one size, given out in turn."""

    def __init__(self, inner: BufferSource, numel: int, dtype: torch.dtype):
        self.inner = inner
        self._front = inner.rent(numel, dtype)  # clean: near miss, close unrents front and back
        self._back = inner.rent(numel, dtype)  # clean: near miss, close unrents front and back
        self._spare = inner.rent(numel, dtype)  # leak: close has front and back only

    def current(self) -> torch.Tensor:
        return self._front

    def flip(self) -> torch.Tensor:
        self._front, self._back = self._back, self._front
        self._spare.copy_(self._back)
        return self._front

    def close(self) -> None:
        self.inner.unrent(self._front)
        self.inner.unrent(self._back)
