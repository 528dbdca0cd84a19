"""Registered memory windows for one-sided reads between workers."""
from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Window:
    addr: int
    length: int
    rkey: int


class PageRegistry:
    """Pin counts per page range. A range is registered on its first pin."""

    def __init__(self, register: Callable[[int, int], int], deregister: Callable[[int], None]) -> None:
        self._register = register
        self._deregister = deregister
        self._mu = threading.Lock()
        self._count: dict[tuple[int, int], int] = {}
        self._rkey: dict[tuple[int, int], int] = {}

    def pin(self, addr: int, length: int) -> Window:
        key = (addr, length)
        with self._mu:
            if key not in self._rkey:
                self._rkey[key] = self._register(addr, length)
            self._count[key] = self._count.get(key, 0) + 1  # clean: the window that stands for it is returned
            return Window(addr, length, self._rkey[key])

    def unpin(self, w: Window) -> None:
        key = (w.addr, w.length)
        with self._mu:
            self._count[key] -= 1
            if self._count[key] == 0:
                del self._count[key]
                self._deregister(self._rkey.pop(key))


class ReadEngine:
    """Executes reads on a thread pool and unpins from the completion callback."""

    def __init__(self, registry: PageRegistry, read: Callable[[Window, int], bytes], workers: int = 4) -> None:
        self.registry = registry
        self.read = read
        self._exec = ThreadPoolExecutor(workers)
        self._completed: "queue.Queue[Window]" = queue.Queue()

    def submit(self, addr: int, length: int, offset: int) -> "Future[bytes]":
        w = self.registry.pin(addr, length)  # clean: near miss, the done callback unpins it whatever the outcome
        fut = self._exec.submit(self.read, w, offset)
        fut.add_done_callback(lambda _f: self.registry.unpin(w))
        return fut

    def submit_on_success(self, addr: int, length: int, sink: Callable[[bytes], None]) -> "Future[bytes]":
        """Deliver the data to ``sink`` when it arrives."""
        w = self.registry.pin(addr, length)  # leak: the callback returns early for a cancelled or failed read

        def _done(fut: "Future[bytes]") -> None:
            if fut.cancelled() or fut.exception() is not None:
                logger.warning("read of %#x did not complete", w.addr)
                return
            sink(fut.result())
            self.registry.unpin(w)

        fut = self._exec.submit(self.read, w, 0)
        fut.add_done_callback(_done)
        return fut

    def submit_queued(self, addr: int, length: int) -> None:
        """Start a read whose window ``reap`` unpins later."""
        w = self.registry.pin(addr, length)  # clean: near miss, travels through the queue that reap drains

        def _run() -> None:
            try:
                self.read(w, 0)
            finally:
                self._completed.put(w)

        self._exec.submit(_run)

    def reap(self) -> int:
        n = 0
        while True:
            try:
                w = self._completed.get_nowait()
            except queue.Empty:
                return n
            self.registry.unpin(w)
            n += 1

    def close(self) -> None:
        self._exec.shutdown(wait=True)
        self.reap()


class WindowTable:
    """Windows that peers know by request id."""

    def __init__(self, registry: PageRegistry) -> None:
        self.registry = registry
        self._by_req: dict[str, list[Window]] = {}
        self._meta: dict[str, Window] = {}

    def publish(self, req_id: str, ranges: list[tuple[int, int]]) -> list[Window]:
        windows = self._by_req.setdefault(req_id, [])
        for addr, length in ranges:
            windows.append(self.registry.pin(addr, length))  # clean: near miss, setdefault keeps earlier windows of the id
        return list(windows)

    def publish_meta(self, req_id: str, addr: int, length: int) -> Window:
        w = self.registry.pin(addr, length)  # clean: the window it displaces is unpinned, retract unpins the last
        prev = self._meta.get(req_id)
        self._meta[req_id] = w
        if prev is not None:
            self.registry.unpin(prev)
        return w

    def republish(self, req_id: str, ranges: list[tuple[int, int]]) -> None:
        """Replace the windows of a request after its pages moved."""
        fresh: list[Window] = []
        for addr, length in ranges:
            fresh.append(self.registry.pin(addr, length))  # leak: the list stored over still holds the old windows
        self._by_req[req_id] = fresh

    def retract(self, req_id: str) -> None:
        for w in self._by_req.pop(req_id, []):
            self.registry.unpin(w)
        meta = self._meta.pop(req_id, None)
        if meta is not None:
            self.registry.unpin(meta)


def copy_ranges(registry: PageRegistry, read: Callable[[Window, int], bytes], ranges: list[tuple[int, int]]) -> bytes:
    """Read several ranges into one buffer."""
    out = bytearray()
    for addr, length in ranges:
        w = registry.pin(addr, length)  # clean: near miss, both arms of the if unpin
        chunk = read(w, 0)
        if len(chunk) < length:
            registry.unpin(w)
            break
        registry.unpin(w)
        out += chunk
    return bytes(out)


def first_filled(registry: PageRegistry, read: Callable[[Window, int], bytes], ranges: list[tuple[int, int]]) -> bytes:
    """The first range that has any data."""
    windows: list[Window] = []
    for addr, length in ranges:
        windows.append(registry.pin(addr, length))  # leak: those behind the first hit stay pinned
    for w in windows:
        data = read(w, 0)
        registry.unpin(w)
        if data:
            return data
    return b""


def warm_ranges(registry: PageRegistry, ranges: list[tuple[int, int]]) -> list[int]:
    """Register ranges ahead of use; returns their remote keys."""
    return [registry.pin(a, n).rkey for a, n in ranges]  # leak: only the keys are kept, the windows are gone
