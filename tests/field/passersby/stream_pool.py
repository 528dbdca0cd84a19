"""Side streams and events for overlapping copies with compute."""
from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Any, Callable, List, Optional, Type

import torch

log = logging.getLogger(__name__)


class StreamHandle:
    def __init__(self, index: int) -> None:
        self.index = index
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def wait_for(self, other: "StreamHandle") -> None:
        if self.stream is not None and other.stream is not None:
            self.stream.wait_stream(other.stream)


class StreamPool:
    def __init__(self, size: int) -> None:
        self._handles = [StreamHandle(i) for i in range(size)]
        self._busy = [0] * size
        self._sem = threading.BoundedSemaphore(size)

    def acquire_stream(self) -> StreamHandle:
        self._sem.acquire()  # clean: release_stream releases it
        i = self._busy.index(0)
        self._busy[i] = 1  # clean: the handle with this index goes to the caller
        return self._handles[i]

    def try_acquire_stream(self) -> Optional[StreamHandle]:
        if not self._sem.acquire(blocking=False):  # clean: near miss, failure holds nothing, success belongs to the handle
            return None
        i = self._busy.index(0)
        self._busy[i] = 1  # clean: the handle with this index goes to the caller
        return self._handles[i]

    def release_stream(self, h: StreamHandle) -> None:
        self._busy[h.index] = 0
        self._sem.release()


class SideStream:
    """with SideStream(pool) as s: ..."""

    def __init__(self, pool: StreamPool, sync: bool = True) -> None:
        self.pool = pool
        self.sync = sync
        self.handle: Optional[StreamHandle] = None

    def __enter__(self) -> StreamHandle:
        self.handle = self.pool.acquire_stream()  # clean: __exit__ releases it on every path
        return self.handle

    def __exit__(self, et: Optional[Type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        h, self.handle = self.handle, None
        assert h is not None
        try:
            if self.sync and et is None:
                h.synchronize()
        finally:
            self.pool.release_stream(h)


class CopyPair:
    """One stream for each direction."""

    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self.h2d: Optional[StreamHandle] = None
        self.d2h: Optional[StreamHandle] = None

    def __enter__(self) -> "CopyPair":
        self.h2d = self.pool.acquire_stream()  # leak: __exit__ returns early after an exception
        self.d2h = self.pool.acquire_stream()  # leak: __exit__ returns early after an exception
        return self

    def __exit__(self, et: Any, ev: Any, tb: Any) -> None:
        if et is not None:
            log.error("copy failed: %s", ev)
            return
        for h in (self.h2d, self.d2h):
            if h is not None:
                h.synchronize()
                self.pool.release_stream(h)
        self.h2d = self.d2h = None


class Offloader:
    def __init__(self, pool: StreamPool, overlap: bool = True) -> None:
        self.pool = pool
        self.overlap = overlap
        self._own = pool.acquire_stream() if overlap else None  # clean: near miss, close() releases it if there is one

    def to_host(self, ts: List[torch.Tensor]) -> List[torch.Tensor]:
        with SideStream(self.pool):  # clean: with statement
            return [t.to("cpu", non_blocking=True) for t in ts]

    def to_device(self, ts: List[torch.Tensor], device: torch.device) -> List[torch.Tensor]:
        h = self.pool.try_acquire_stream()  # leak: an empty list returns before the release
        if h is None:
            return [t.to(device) for t in ts]
        if not ts:
            return []
        out = [t.to(device, non_blocking=True) for t in ts]
        h.synchronize()
        self.pool.release_stream(h)
        return out

    def swap(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if not self.overlap:
            tmp = a.clone()
            a.copy_(b)
            b.copy_(tmp)
            return
        h = self.pool.acquire_stream()  # clean: near miss, the mode without overlap has returned before
        tmp = a.clone()
        a.copy_(b, non_blocking=True)
        b.copy_(tmp, non_blocking=True)
        h.synchronize()
        self.pool.release_stream(h)

    def chain(self, fns: List[Callable[[], None]]) -> None:
        prev: Optional[StreamHandle] = None
        for fn in fns:
            cur = self.pool.acquire_stream()  # clean: near miss, each is released when the next one follows, the last after the loop
            if prev is not None:
                cur.wait_for(prev)
                self.pool.release_stream(prev)
            fn()
            prev = cur
        if prev is not None:
            prev.synchronize()
            self.pool.release_stream(prev)

    def fan(self, fns: List[Callable[[], None]]) -> None:
        last: Optional[StreamHandle] = None
        for fn in fns:
            cur = self.pool.acquire_stream()  # leak: last is replaced unreleased in every round but the final one
            if last is not None:
                cur.wait_for(last)
            fn()
            last = cur
        if last is not None:
            last.synchronize()
            self.pool.release_stream(last)

    def warm(self) -> None:
        self.pool.acquire_stream().synchronize()  # leak: the handle is only used to synchronize, nobody can release it

    def close(self) -> None:
        if self._own is not None:
            self._own.synchronize()
            self.pool.release_stream(self._own)
            self._own = None
