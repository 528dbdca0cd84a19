"""Logit workspaces that are shared by the draft and the target model."""
from __future__ import annotations

import contextlib
import threading
from typing import Iterator, List, Optional

import torch


class WorkspacePool:
    def __init__(self, slots: int, vocab: int, depth: int):
        self.slots = slots
        self.vocab = vocab
        self._sem = threading.BoundedSemaphore(depth)
        self._bufs: List[torch.Tensor] = [torch.empty(slots, vocab) for _ in range(depth)]

    def acquire(self, wait: bool = True) -> Optional[torch.Tensor]:
        if not self._sem.acquire(blocking=wait):  # clean: the permit goes with the buffer, release gives both back
            return None
        return self._bufs.pop()  # clean: handed to the caller

    def acquire_rows(self, rows: int) -> Optional[torch.Tensor]:
        if not self._sem.acquire(blocking=False):  # leak: the permit is kept when the rows do not fit
            return None
        if rows > self.slots:
            return None
        return self._bufs.pop()  # clean: handed to the caller

    def release(self, buf: torch.Tensor) -> None:
        self._bufs.append(buf)
        self._sem.release()


@contextlib.contextmanager
def workspace(pool: WorkspacePool, wait: bool = True) -> Iterator[Optional[torch.Tensor]]:
    buf = pool.acquire(wait)  # clean: near miss, the early return holds nothing, finally covers the rest
    if buf is None:
        yield None
        return
    try:
        yield buf
    finally:
        pool.release(buf)
