"""Pinned host staging buffers for offloading KV pages to CPU memory."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional

import torch


class PinnedPool:
    """Reuses pinned tensors of a single shape."""

    def __init__(self, shape, depth: int, dtype=torch.float16):
        self._cond = threading.Condition()
        self._idle: List[torch.Tensor] = [
            torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(depth)
        ]

    def take(self) -> torch.Tensor:
        with self._cond:
            while not self._idle:
                self._cond.wait()
            return self._idle.pop()  # clean: handed to the caller

    def take_nowait(self, numel: int) -> Optional[torch.Tensor]:
        with self._cond:
            if not self._idle:
                return None
            buf = self._idle.pop()  # clean: near miss, a buffer that is too small goes back before None is returned
            if buf.numel() < numel:
                self._idle.append(buf)
                return None
            return buf

    def take_zeroed(self, numel: int) -> Optional[torch.Tensor]:
        with self._cond:
            if not self._idle:
                return None
            buf = self._idle.pop()  # leak: a buffer that is too small is neither returned nor put back
        if buf.numel() < numel:
            return None
        buf.zero_()
        return buf

    def give(self, buf: torch.Tensor) -> None:
        with self._cond:
            self._idle.append(buf)
            self._cond.notify()


class PageStager:
    """Moves single pages between device and host."""

    def __init__(self, pool: PinnedPool):
        self.pool = pool

    def _stage(self, page: torch.Tensor) -> torch.Tensor:
        buf = self.pool.take()  # clean: helper hands the buffer to its caller
        buf[: page.numel()].copy_(page.reshape(-1))
        return buf

    def to_host(self, page: torch.Tensor) -> torch.Tensor:
        staged = self._stage(page)  # leak: only a clone is kept, the pooled buffer is dropped
        return staged[: page.numel()].clone().view(page.shape)

    def to_host_pooled(self, page: torch.Tensor) -> torch.Tensor:
        staged = self._stage(page)  # clean: near miss, given back after the clone
        out = staged[: page.numel()].clone().view(page.shape)
        self.pool.give(staged)
        return out

    def checksum(self, page: torch.Tensor) -> float:
        return float(self._stage(page).sum())  # leak: the buffer is reachable only inside the expression

    def digest(self, page: torch.Tensor) -> float:
        staged = self._stage(page)  # clean: given back in the finally
        try:
            return float(staged.double().sum())
        finally:
            self.pool.give(staged)


class OffloadQueue:
    """Keeps staged pages until the disk writer has flushed them."""

    def __init__(self, pool: PinnedPool):
        self.pool = pool
        self.staged: Dict[str, torch.Tensor] = {}
        self.order: List[str] = []

    def put(self, key: str, page: torch.Tensor) -> None:
        if key in self.staged:
            return
        buf = self.pool.take()  # clean: near miss, the key is known to be absent, flush gives it back
        buf[: page.numel()].copy_(page.reshape(-1))
        self.staged[key] = buf
        self.order.append(key)

    def replace(self, key: str, page: torch.Tensor) -> None:
        buf = self.pool.take()  # leak: overwrites a buffer already staged under the key
        buf[: page.numel()].copy_(page.reshape(-1))
        self.staged[key] = buf
        if key not in self.order:
            self.order.append(key)

    def update(self, key: str, page: torch.Tensor) -> None:
        buf = self.pool.take()  # clean: near miss, the former holding is given back
        buf[: page.numel()].copy_(page.reshape(-1))
        old = self.staged.pop(key, None)
        if old is not None:
            self.pool.give(old)
        else:
            self.order.append(key)
        self.staged[key] = buf

    def put_batch(self, pages: Dict[str, torch.Tensor]) -> int:
        done = 0
        for key, page in pages.items():
            buf = self.pool.take_nowait(page.numel())  # leak: the continue for a staged key skips the give
            if buf is None:
                break
            if key in self.staged:
                continue
            buf[: page.numel()].copy_(page.reshape(-1))
            self.staged[key] = buf
            self.order.append(key)
            done += 1
        return done

    def warm(self, sizes: List[int]) -> int:
        hits = 0
        for size in sizes:
            buf = self.pool.take_nowait(size)  # clean: near miss, continue only when nothing was taken
            if buf is None:
                continue
            buf.zero_()
            hits += 1
            self.pool.give(buf)
        return hits

    def flush(self, sink) -> None:
        for key in self.order:
            buf = self.staged.pop(key)
            sink.write(key, buf)
            self.pool.give(buf)
        self.order.clear()
