"""Pinned staging buffers and copy streams between device pages and host memory."""
from __future__ import annotations

import hashlib
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Iterable, Iterator, List, Optional

logger = logging.getLogger("swap")


@dataclass
class PinnedBuffer:
    index: int
    data: bytearray
    used: int = 0

    def put(self, payload: bytes) -> None:
        self.data[self.used:self.used + len(payload)] = payload
        self.used += len(payload)

    def view(self) -> memoryview:
        return memoryview(self.data)[: self.used]


class PinnedPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self._cond = threading.Condition()
        self._idle = [PinnedBuffer(i, bytearray(nbytes)) for i in range(count)]

    def checkout(self, timeout: Optional[float] = None) -> Optional[PinnedBuffer]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._idle), timeout):
                return None
            return self._idle.pop()

    def checkin(self, buf: PinnedBuffer) -> None:
        with self._cond:
            buf.used = 0
            self._idle.append(buf)
            self._cond.notify()


class StreamPool:
    def __init__(self, count: int) -> None:
        self._sem = threading.Semaphore(count)
        self._mutex = threading.Lock()
        self._streams = list(range(count))

    def borrow(self) -> int:
        self._sem.acquire()  # clean: given back by give_back
        with self._mutex:
            return self._streams.pop()

    def give_back(self, stream: int) -> None:
        with self._mutex:
            self._streams.append(stream)
        self._sem.release()


@dataclass
class Page:
    page_id: int
    payload: bytes
    dirty: bool = True
    tags: List[str] = field(default_factory=list)


class StagedCopy:
    """Holds one staging buffer for the time of a block of copies."""

    def __init__(self, pool: PinnedPool, detached: bool = False) -> None:
        self.pool = pool
        self.detached = detached
        self.buf: Optional[PinnedBuffer] = None

    def __enter__(self) -> PinnedBuffer:
        self.buf = self.pool.checkout()  # leak: __exit__ returns before checkin when nothing was staged
        return self.buf

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.buf.used == 0:
            return False
        logger.debug("staged %d bytes", self.buf.used)
        self.pool.checkin(self.buf)
        self.buf = None
        return False


class StreamScope:
    def __init__(self, streams: StreamPool) -> None:
        self._streams = streams
        self._held: List[int] = []

    def __enter__(self) -> "StreamScope":
        return self

    def take(self) -> int:
        stream = self._streams.borrow()  # clean: kept in _held, __exit__ gives all of them back
        self._held.append(stream)
        return stream

    def __exit__(self, *exc) -> None:
        while self._held:
            self._streams.give_back(self._held.pop())


class CopyEngine:
    def __init__(self, buffers: PinnedPool, streams: StreamPool, workers: int = 4) -> None:
        self.buffers = buffers
        self.streams = streams
        self._exec = ThreadPoolExecutor(workers)
        self.bytes_out = 0

    def _dma(self, stream: int, buf: PinnedBuffer) -> int:
        self.bytes_out += buf.used
        return buf.used

    def submit_out(self, pages: Iterable[Page]) -> "Future[int]":
        buf = self.buffers.checkout()  # clean: near miss, the done callback checks it in
        stream = self.streams.borrow()  # clean: near miss, the done callback gives it back
        for page in pages:
            buf.put(page.payload)

        def _landed(_fut: Future) -> None:
            self.streams.give_back(stream)
            self.buffers.checkin(buf)

        fut = self._exec.submit(self._dma, stream, buf)
        fut.add_done_callback(_landed)
        return fut

    def submit_in(self, page: Page) -> "Future[int]":
        buf = self.buffers.checkout()  # clean: the callback checks it in
        stream = self.streams.borrow()  # leak: the callback returns only the buffer
        buf.put(page.payload)
        fut = self._exec.submit(self._dma, stream, buf)
        fut.add_done_callback(lambda _f: self.buffers.checkin(buf))
        return fut

    def flush_dirty(self, pages: List[Page]) -> int:
        total = 0
        stream = self.streams.borrow()  # clean: given back after the loop
        for page in pages:
            buf = self.buffers.checkout(timeout=0.2)  # leak: continue for a clean page skips checkin
            if buf is None:
                logger.warning("no staging buffer for page %d", page.page_id)
                break
            if not page.dirty:
                continue
            buf.put(page.payload)
            total += self._dma(stream, buf)
            page.dirty = False
            self.buffers.checkin(buf)
        self.streams.give_back(stream)
        return total

    def pipeline(self, pages: Iterable[Page]) -> int:
        """Double buffering: while one buffer is copied the next is filled."""
        total = 0
        previous: Optional[PinnedBuffer] = None
        with StreamScope(self.streams) as scope:  # clean: with closes the scope
            stream = scope.take()  # clean: near miss, the scope gives it back
            for page in pages:
                buf = self.buffers.checkout()  # clean: near miss, checked in one turn later or after the loop
                buf.put(page.payload)
                if previous is not None:
                    total += self._dma(stream, previous)
                    self.buffers.checkin(previous)
                previous = buf
            if previous is not None:
                total += self._dma(stream, previous)
                self.buffers.checkin(previous)
        return total

    def gather(self, pages: Iterable[Page]) -> PinnedBuffer:
        buf = self.buffers.checkout()  # clean: handed to the caller
        for page in pages:
            buf.put(page.payload)
        return buf

    def fingerprint(self, pages: List[Page]) -> str:
        packed = self.gather(pages)  # leak: only the digest survives, the buffer is dropped
        return hashlib.blake2b(bytes(packed.view()), digest_size=16).hexdigest()

    def snapshot(self, pages: List[Page]) -> Iterator[bytes]:
        stream = self.streams.borrow()  # leak: return from the generator at the first untagged page
        for page in pages:
            if not page.tags:
                logger.info("snapshot stops at page %d", page.page_id)
                return
            yield page.payload
        self.streams.give_back(stream)

    def mirror(self, pages: List[Page]) -> int:
        with StagedCopy(self.buffers) as buf:  # clean: the with is right, the loss is in __exit__
            for page in pages:
                if page.dirty:
                    buf.put(page.payload)
            count = buf.used
        return count
