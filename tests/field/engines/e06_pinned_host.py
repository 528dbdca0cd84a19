"""Pinned host buffers for copying weights and KV pages off the device."""
from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager
from typing import Iterator

import torch

logger = logging.getLogger(__name__)


class HostBufferPool:
    """Buffers by size class; ``borrow`` grows a class up to its cap."""

    def __init__(self, cap_per_class: int = 8) -> None:
        self.cap = cap_per_class
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._made: dict[int, int] = {}
        self.outstanding = 0

    @staticmethod
    def _size_class(nbytes: int) -> int:
        return 1 << max(12, (nbytes - 1).bit_length())

    def borrow(self, nbytes: int) -> torch.Tensor | None:
        cls = self._size_class(nbytes)
        idle = self._idle.setdefault(cls, [])
        if idle:
            self.outstanding += 1
            return idle.pop()  # clean: returned to the borrower
        if self._made.get(cls, 0) >= self.cap:
            return None
        self._made[cls] = self._made.get(cls, 0) + 1
        self.outstanding += 1
        return torch.empty(cls, dtype=torch.uint8)

    def return_(self, buf: torch.Tensor) -> None:
        self.outstanding -= 1
        self._idle[buf.numel()].append(buf)

    @contextmanager
    def borrowed(self, nbytes: int) -> Iterator[torch.Tensor | None]:
        buf = self.borrow(nbytes)  # clean: returned in the finally when there is one
        try:
            yield buf
        finally:
            if buf is not None:
                self.return_(buf)


class OffloadSession:
    """A batch of device-to-host copies that complete together."""

    def __init__(self, pool: HostBufferPool) -> None:
        self.pool = pool
        self._inflight: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._header: torch.Tensor | None = None

    def __enter__(self) -> "OffloadSession":
        self._header = self.pool.borrow(4096)  # leak: __exit__ returns before the header when nothing is in flight
        return self

    def add(self, src: torch.Tensor) -> bool:
        nbytes = src.numel() * src.element_size()
        buf = self.pool.borrow(nbytes)  # clean: near miss, the early return of __exit__ happens only for an empty list
        if buf is None:
            return False
        buf[:nbytes].copy_(src.contiguous().view(torch.uint8).flatten())
        self._inflight.append((buf, src))
        return True

    def __exit__(self, exc_type, exc, tb) -> None:
        if not self._inflight:
            return
        for buf, _src in self._inflight:
            self.pool.return_(buf)
        self._inflight.clear()
        if self._header is not None:
            self.pool.return_(self._header)
            self._header = None


class DoubleBuffer:
    """Two buffers used in turn, front while back is filled."""

    def __init__(self, pool: HostBufferPool, nbytes: int) -> None:
        self.pool = pool
        self.nbytes = nbytes
        self.front = pool.borrow(nbytes)  # clean: near miss, swap only exchanges the names and close returns both
        self.back = pool.borrow(nbytes)  # clean: near miss, swap only exchanges the names and close returns both

    def swap(self) -> None:
        self.front, self.back = self.back, self.front

    def resize(self, nbytes: int) -> bool:
        """Switch to larger buffers when both can be had."""
        front = self.pool.borrow(nbytes)  # leak: when the second borrow fails the first is not returned
        back = self.pool.borrow(nbytes)  # clean: None or kept as the new back buffer
        if front is None or back is None:
            if back is not None:
                self.pool.return_(back)
            return False
        self.close()
        self.front, self.back, self.nbytes = front, back, nbytes
        return True

    def close(self) -> None:
        for buf in (self.front, self.back):
            if buf is not None:
                self.pool.return_(buf)
        self.front = self.back = None


def checksum_pages(pool: HostBufferPool, pages: list[torch.Tensor]) -> list[int]:
    sums: list[int] = []
    for page in pages:
        n = page.numel() * page.element_size()
        with pool.borrowed(n) as buf:  # clean: the context manager returns it
            if buf is None:
                sums.append(int(page.view(torch.uint8).sum()))
                continue
            buf[:n].copy_(page.view(torch.uint8).flatten())
            sums.append(int(buf[:n].sum()))
    return sums


def write_sorted(pool: HostBufferPool, pages: list[torch.Tensor], fh) -> None:
    """Write pages in order of their size."""
    by_size: dict[int, torch.Tensor] = {}
    for page in pages:
        n = page.numel() * page.element_size()
        buf = pool.borrow(n)  # leak: a second page of the same size takes over the key of the first
        if buf is None:
            break
        buf[:n].copy_(page.view(torch.uint8).flatten())
        by_size[n] = buf
    for n in sorted(by_size):
        fh.write(by_size[n][:n].numpy().tobytes())
        pool.return_(by_size[n])


def drain_to_disk(pool: HostBufferPool, pages: list[torch.Tensor], fh) -> int:
    """Write pages through a small queue of buffers."""
    pending: deque[tuple[torch.Tensor, int]] = deque()
    total = 0
    for page in pages:
        n = page.numel() * page.element_size()
        buf = pool.borrow(n)  # leak: buffers still queued after the loop are written but not returned
        if buf is None:
            fh.write(page.numpy().tobytes())
            total += n
            continue
        buf[:n].copy_(page.view(torch.uint8).flatten())
        pending.append((buf, n))
        if len(pending) > 2:
            head, size = pending.popleft()
            fh.write(head[:size].numpy().tobytes())
            pool.return_(head)
            total += size
    for head, size in pending:
        fh.write(head[:size].numpy().tobytes())
        total += size
    pending.clear()
    return total
