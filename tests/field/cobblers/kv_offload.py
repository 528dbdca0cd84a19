"""Offloading of cold KV pages to host memory: staging buffers, copy streams, events."""
from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)


class _NullStream:
    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.pending: List[Callable[[], None]] = []

    def launch(self, fn: Callable[[], None]) -> None:
        self.pending.append(fn)

    def synchronize(self) -> None:
        while self.pending:
            self.pending.pop(0)()

    def query(self) -> bool:
        return not self.pending


class CopyFailed(RuntimeError):
    pass


class HostPage:
    __slots__ = ("data", "page_id")

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.page_id: Optional[int] = None


class HostPagePool:
    def __init__(self, count: int, nbytes: int) -> None:
        self._shelf: List[HostPage] = [HostPage(nbytes) for _ in range(count)]

    def checkout(self) -> Optional[HostPage]:
        return self._shelf.pop() if self._shelf else None

    def checkin(self, page: HostPage) -> None:
        page.page_id = None
        self._shelf.append(page)

    def __len__(self) -> int:
        return len(self._shelf)


class StreamPool:
    """Copy streams by priority, created on demand and reused."""

    def __init__(self, make: Callable[[int], Any] = _NullStream, limit: int = 8) -> None:
        self._make = make
        self._idle: Dict[int, Deque[Any]] = defaultdict(deque)
        self.limit = limit
        self.out = 0

    def get(self, priority: int = 0) -> Any:
        if self.out >= self.limit:
            raise RuntimeError("copy streams exhausted")
        self.out += 1
        idle = self._idle[priority]
        return idle.popleft() if idle else self._make(priority)

    def put(self, stream: Any) -> None:
        self.out -= 1
        self._idle[stream.priority].append(stream)


class OffloadManager:
    def __init__(self, pages: HostPagePool, streams: StreamPool) -> None:
        self.pages = pages
        self.streams = streams
        self.resident: Dict[int, HostPage] = {}
        self.inflight: List[Tuple[Any, HostPage]] = []
        self.callbacks: List[Callable[[], None]] = []
        self._lock = threading.RLock()

    def swap_out(self, page_id: int, device_view: bytes) -> bool:
        """Device -> host, asynchronous; finished copies are collected by poll()."""
        page = self.pages.checkout()  # clean: near miss, owned by inflight and later by resident
        if page is None:
            return False
        stream = self.streams.get()  # clean: poll() puts it back once the copy is done
        page.page_id = page_id
        stream.launch(lambda: page.data.__setitem__(slice(0, len(device_view)), device_view))
        self.inflight.append((stream, page))
        return True

    def _settle(self, page_id: int, page: HostPage) -> None:
        """Make `page` the resident copy; an older copy goes back to the pool."""
        stale = self.resident.pop(page_id, None)
        if stale is not None:
            self.pages.checkin(stale)
        page.page_id = page_id
        self.resident[page_id] = page

    def poll(self, block: bool = False) -> int:
        done = 0
        while self.callbacks:
            self.callbacks.pop()()
        still: List[Tuple[Any, HostPage]] = []
        for stream, page in self.inflight:
            if block:
                stream.synchronize()
            if not stream.query():
                still.append((stream, page))
                continue
            self.streams.put(stream)
            self._settle(page.page_id, page)
            done += 1
        self.inflight = still
        return done

    def swap_out_sync(self, page_id: int, device_view: bytes, copy: Callable[[bytearray, bytes], None]) -> bool:
        stream = self.streams.get(priority=1)  # leak: not put back when the host has no page
        page = self.pages.checkout()  # clean: kept in resident or checked in when the copy fails
        if page is None:
            logger.info("host tier full, page %d stays", page_id)
            return False
        try:
            copy(page.data, device_view)
        except CopyFailed:
            self.pages.checkin(page)
            self.streams.put(stream)
            return False
        self._settle(page_id, page)
        self.streams.put(stream)
        return True

    def swap_in(self, page_id: int) -> Optional[bytes]:
        page = self.resident.pop(page_id, None)
        if page is None:
            return None
        stream = self.streams.get(priority=1)  # clean: put back in the finally
        try:
            stream.synchronize()
            return bytes(page.data)
        finally:
            self.streams.put(stream)
            self.pages.checkin(page)

    def prefetch(self, page_ids: List[int]) -> Dict[int, bytes]:
        """Read-ahead for a resumed sequence. Pages not on the host are skipped."""
        ahead: Dict[int, bytes] = {}
        for pid in page_ids:
            stream = self.streams.get()  # leak: the continue for a page that is not resident keeps the stream
            page = self.resident.get(pid)
            if page is None:
                continue
            stream.synchronize()
            ahead[pid] = bytes(page.data)
            self.streams.put(stream)
        return ahead

    def clone_page(self, src_id: int, dst_id: int) -> bool:
        src = self.resident.get(src_id)
        if src is None:
            return False
        dst = self.pages.checkout()  # leak: dropped on the return for an id that is already resident
        if dst is None:
            return False
        dst.data[:] = src.data
        if dst_id in self.resident:
            return True
        dst.page_id = dst_id
        self.resident[dst_id] = dst
        return True

    def demote(self, items: Dict[int, bytes], copy: Callable[[bytearray, bytes], None]) -> List[int]:
        """Move as many as possible; returns the ids that moved."""
        moved: List[int] = []
        for pid, view in items.items():
            page = self.pages.checkout()  # clean: near miss, checked in when the copy fails, else resident
            if page is None:
                break
            try:
                copy(page.data, view)
            except CopyFailed as exc:
                logger.warning("page %d: %s", pid, exc)
                self.pages.checkin(page)
                continue
            self._settle(pid, page)
            moved.append(pid)
        return moved

    def demote_fast(self, items: Dict[int, bytes], copy: Callable[[bytearray, bytes], None]) -> int:
        moved = 0
        for pid, view in items.items():
            page = self.pages.checkout()  # leak: a failed copy is counted and survived, its page is not checked in
            if page is None:
                return moved
            try:
                copy(page.data, view)
                page.page_id = pid
                old, self.resident[pid] = self.resident.get(pid), page
                if old:
                    self.pages.checkin(old)
                moved += 1
            except CopyFailed:
                logger.debug("copy of page %d failed", pid)
        return moved

    def on_copy_done(self, page_id: int, device_view: bytes, then: Callable[[int], None]) -> None:
        """Copy and call back; the callback side sees the page in `resident`."""
        stream = self.streams.get()  # clean: near miss, the launched callback puts it back
        def _finish() -> None:
            page = self.pages.checkout()  # clean: becomes resident
            if page is not None:
                page.data[: len(device_view)] = device_view
                self._settle(page_id, page)
            self.streams.put(stream)
            then(page_id)

        stream.launch(_finish)
        self.callbacks.append(stream.synchronize)

    def evict_lru(self, keep: int) -> int:
        self._lock.acquire()  # leak: nothing to evict returns with the lock held
        surplus = len(self.resident) - keep
        if surplus <= 0:
            return 0
        for pid in list(self.resident)[:surplus]:
            self.pages.checkin(self.resident.pop(pid))
        self._lock.release()
        return surplus


class ScopedStream:
    """`with ScopedStream(pool) as s:`; synchronises on the way out."""

    def __init__(self, pool: StreamPool, priority: int = 0) -> None:
        self.pool = pool
        self.priority = priority
        self.stream: Any = None

    def __enter__(self) -> Any:
        self.stream = self.pool.get(self.priority)  # leak: __exit__ returns early when the stream is already idle
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is None and self.stream.query():
            return False
        self.stream.synchronize()
        self.pool.put(self.stream)
        self.stream = None
        return False


class SideStream:
    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool

    def __enter__(self) -> Any:
        self._s = self.pool.get(0)  # clean: near miss, __exit__ puts it back before its early return
        return self._s

    def __exit__(self, exc_type, exc, tb) -> bool:
        self.pool.put(self._s)
        if exc_type is None:
            self._s.synchronize()
            return False
        return issubclass(exc_type, CopyFailed)


def checksum_all(mgr: OffloadManager) -> int:
    total = 0
    with SideStream(mgr.streams) as s:  # clean: with over a sound context manager
        for pid, page in mgr.resident.items():
            s.launch(lambda: None)
            total += sum(page.data) ^ pid
    return total
