"""Offloads KV pages to host memory through pinned buffers and side streams."""
from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass
from typing import Iterator, Optional

import torch


@dataclass
class PinnedBuffer:
    index: int
    data: torch.Tensor
    used: int = 0


class PinnedPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self._lock = threading.Lock()
        self._idle: deque[PinnedBuffer] = deque(
            PinnedBuffer(i, torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)) for i in range(count)
        )
        self.nbytes = nbytes

    def get(self) -> Optional[PinnedBuffer]:
        with self._lock:
            return self._idle.popleft() if self._idle else None

    def get_fitting(self, nbytes: int) -> Optional[PinnedBuffer]:
        with self._lock:
            if not self._idle:
                return None
            buf = self._idle.popleft()  # leak: a buffer too small is not put back
            if buf.data.numel() < nbytes:
                return None
            return buf

    def put(self, buf: PinnedBuffer) -> None:
        buf.used = 0
        with self._lock:
            self._idle.append(buf)


class StreamPool:
    def __init__(self, count: int) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(count)]

    def borrow(self) -> torch.cuda.Stream:
        return self._streams.pop()

    def give_back(self, stream: torch.cuda.Stream) -> None:
        self._streams.append(stream)


class StreamScope:
    def __init__(self, pool: StreamPool) -> None:
        self._pool = pool
        self.stream: Optional[torch.cuda.Stream] = None

    def __enter__(self) -> torch.cuda.Stream:
        self.stream = self._pool.borrow()  # leak: __exit__ returns early upon an exception that it swallows
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, torch.cuda.OutOfMemoryError):
            return True
        self.stream.synchronize()
        self._pool.give_back(self.stream)
        return False


@dataclass
class PendingCopy:
    page: int
    buf: PinnedBuffer
    event: torch.cuda.Event
    cancelled: bool = False


class Offloader:
    def __init__(self, pinned: PinnedPool, streams: StreamPool, cache: torch.Tensor, sink) -> None:
        self.pinned = pinned
        self.streams = streams
        self.cache = cache
        self.sink = sink
        self._pending: deque[PendingCopy] = deque()
        self._restore: dict[int, PinnedBuffer] = {}

    def offload(self, page: int) -> bool:
        buf = self.pinned.get()  # leak: poll drops cancelled copies with their buffer
        if buf is None:
            return False
        with StreamScope(self.streams) as stream:
            self._copy_out(page, buf, stream)
        event = torch.cuda.Event()
        event.record()
        self._pending.append(PendingCopy(page, buf, event))
        return True

    def _copy_out(self, page: int, buf: PinnedBuffer, stream: torch.cuda.Stream) -> None:
        src = self.cache[page].view(torch.uint8).flatten()
        with torch.cuda.stream(stream):
            buf.data[: src.numel()].copy_(src, non_blocking=True)
        buf.used = src.numel()

    def cancel(self, page: int) -> None:
        for copy in self._pending:
            if copy.page == page:
                copy.cancelled = True

    def poll(self) -> int:
        done = 0
        for _ in range(len(self._pending)):
            copy = self._pending.popleft()
            if copy.cancelled:
                continue
            if not copy.event.query():
                self._pending.append(copy)
                continue
            self.sink.store(copy.page, copy.buf.data[: copy.buf.used])
            self.pinned.put(copy.buf)
            done += 1
        return done

    def prefetch(self, page: int) -> bool:
        if page in self._restore:
            return True
        buf = self.pinned.get()  # clean: kept in _restore until finish_restore or drop
        if buf is None:
            return False
        buf.used = self.sink.load(page, buf.data)
        self._restore[page] = buf
        return True

    def finish_restore(self, page: int) -> bool:
        buf = self._restore.pop(page, None)
        if buf is None:
            return False
        stream = self.streams.borrow()  # clean: given back after the copy
        dst = self.cache[page].view(torch.uint8).flatten()
        with torch.cuda.stream(stream):
            dst.copy_(buf.data[: buf.used], non_blocking=True)
        stream.synchronize()
        self.streams.give_back(stream)
        self.pinned.put(buf)
        return True

    def drop(self, page: int) -> None:
        buf = self._restore.pop(page, None)
        if buf is not None:
            self.pinned.put(buf)

    def checksum(self, page: int, nbytes: int) -> Optional[int]:
        buf = self.pinned.get_fitting(nbytes)  # clean: near miss, put on both ways out
        if buf is None:
            return None
        n = self.sink.load(page, buf.data)
        if n < nbytes:
            self.pinned.put(buf)
            return None
        total = int(buf.data[:n].sum())
        self.pinned.put(buf)
        return total

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Optional[torch.Tensor]]:
        buf = self.pinned.get()  # clean: near miss, put in finally where there is one
        try:
            yield buf.data if buf is not None else None
        finally:
            if buf is not None:
                self.pinned.put(buf)

    def stream_pages(self, pages: list[int]) -> Iterator[torch.Tensor]:
        for page in pages:
            buf = self.pinned.get()  # leak: an empty page goes on to the next without put
            if buf is None:
                return
            n = self.sink.load(page, buf.data)
            if n == 0:
                continue
            yield buf.data[:n].clone()
            self.pinned.put(buf)

    def migrate(self, pages: list[int], target: "Offloader") -> int:
        moved = 0
        for page in pages:
            with self.scratch() as data:  # clean: context manager
                if data is None:
                    break
                self.sink.load(page, data)
                target.sink.store(page, data)
                moved += 1
        return moved

    def drain(self) -> None:
        while self._pending:
            self.poll()
        for page in list(self._restore):
            self.drop(page)
