"""Optimizer-state offload to host pages and NVMe.

Adam moments live on disk and are paged in, updated and paged out one parameter
group after another.  Pages are fixed-size float32 arrays; aio handles are few
and shared by all groups.
"""
from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from typing import Dict, Iterable, List, Optional

import numpy as np

log = logging.getLogger("offload")


class HostPages:
    def __init__(self, count: int, page_elems: int):
        self.page_elems = page_elems
        self._arena = np.zeros((count, page_elems), dtype=np.float32)
        self._vacant = list(range(count))
        self._mu = threading.Lock()

    def grab(self) -> Optional[int]:
        with self._mu:
            return self._vacant.pop() if self._vacant else None

    def drop(self, page: int) -> None:
        with self._mu:
            self._vacant.append(page)

    def array(self, page: int) -> np.ndarray:
        return self._arena[page]


class AioHandles:
    def __init__(self, count: int, queue_depth: int):
        self._sem = threading.Semaphore(count)
        self._idle: List["AioHandle"] = [AioHandle(queue_depth) for _ in range(count)]

    def borrow(self) -> "AioHandle":
        self._sem.acquire()  # clean: restore() releases it with the handle
        return self._idle.pop()

    def restore(self, handle: "AioHandle") -> None:
        self._idle.append(handle)
        self._sem.release()

    def borrow_soon(self, timeout: float) -> Optional["AioHandle"]:
        if not self._sem.acquire(timeout=timeout):  # leak: permit stays taken when the idle handle is poisoned
            return None
        handle = self._idle[-1]
        if handle.poisoned:
            log.warning("handle is poisoned, waiting for the janitor")
            return None
        return self._idle.pop()


class AioHandle:
    def __init__(self, queue_depth: int):
        self.queue_depth = queue_depth
        self.poisoned = False

    def pwrite(self, path: str, array: np.ndarray) -> int:
        array.tofile(path)
        return 0 if os.path.exists(path) else -1

    def pread(self, path: str, array: np.ndarray) -> int:
        if not os.path.exists(path):
            return -1
        array[:] = np.fromfile(path, dtype=np.float32, count=array.size)
        return 0


class QuotaPages:
    """A view of HostPages with a limit for one parameter group."""

    def __init__(self, pages: HostPages, limit: int):
        self.pages = pages
        self.limit = limit
        self.used = 0

    def grab(self) -> Optional[int]:
        page = self.pages.grab()  # leak: over quota the inner page is neither kept nor dropped
        if page is None:
            return None
        if self.used >= self.limit:
            return None
        self.used += 1
        return page

    def drop(self, page: int) -> None:
        self.used -= 1
        self.pages.drop(page)

    def array(self, page: int) -> np.ndarray:
        return self.pages.array(page)


class AioSession:
    def __init__(self, handles: AioHandles):
        self.handles = handles
        self.handle: Optional[AioHandle] = None

    def __enter__(self) -> AioHandle:
        self.handle = self.handles.borrow()  # clean: near miss, __exit__ restores before it looks at the error
        return self.handle

    def __exit__(self, exc_type, exc, tb) -> bool:
        handle, self.handle = self.handle, None
        self.handles.restore(handle)
        if exc_type is None:
            return False
        handle.poisoned = True
        return False


class StateSwapper:
    def __init__(self, pages, handles: AioHandles, root: str):
        self.pages = pages
        self.handles = handles
        self.root = root
        self.resident: Dict[str, int] = {}
        self.hinted: Dict[str, int] = {}
        self.stale: set = set()

    def _path(self, key: str) -> str:
        return os.path.join(self.root, key.replace("/", "__") + ".f32")

    def create(self, key: str, init: np.ndarray) -> None:
        page = self.pages.grab()  # leak: a failed write raises with the page in no table
        if page is None:
            raise MemoryError("no host page for " + key)
        with AioSession(self.handles) as aio:  # clean: the session restores the handle
            arr = self.pages.array(page)
            arr[: init.size] = init
            if aio.pwrite(self._path(key), arr) != 0:
                raise IOError("write of %s failed" % key)
        self.resident[key] = page

    def page_in(self, key: str) -> Optional[np.ndarray]:
        if key in self.resident:
            return self.pages.array(self.resident[key])
        page = self.hinted.pop(key, None)
        if page is None:
            page = self.pages.grab()  # clean: near miss, dropped on a failed read, else moved to resident
            if page is None:
                return None
            if not self._fill(key, page):
                self.pages.drop(page)
                return None
        self.resident[key] = page
        return self.pages.array(page)

    def _fill(self, key: str, page: int) -> bool:
        handle = self.handles.borrow()  # clean: restored in finally
        try:
            return handle.pread(self._path(key), self.pages.array(page)) == 0
        finally:
            self.handles.restore(handle)

    def hint(self, keys: Iterable[str]) -> int:
        """Reads ahead for the next group."""
        n = 0
        for key in keys:
            if key in self.resident or key in self.hinted:
                continue
            page = self.pages.grab()  # leak: drop_hints() clears the table without dropping the pages
            if page is None:
                break
            if not self._fill(key, page):
                self.pages.drop(page)
                continue
            self.hinted[key] = page
            n += 1
        return n

    def drop_hints(self) -> None:
        if self.hinted:
            log.info("discarding %d read-ahead pages", len(self.hinted))
        self.hinted.clear()

    def page_out(self, key: str) -> None:
        page = self.resident.pop(key)
        try:
            if key not in self.stale:
                with AioSession(self.handles) as aio:  # clean: the session restores the handle
                    aio.pwrite(self._path(key), self.pages.array(page))
        finally:
            self.pages.drop(page)

    def flush(self) -> None:
        for key in list(self.resident):
            self.page_out(key)

    def verify(self, key: str, want: np.ndarray) -> bool:
        page = self.pages.grab()  # leak: a short array returns False without dropping the page
        if page is None:
            return False
        arr = self.pages.array(page)
        if not self._fill(key, page) or arr.size < want.size:
            return False
        same = bool(np.array_equal(arr[: want.size], want))
        self.pages.drop(page)
        return same


def stream_groups(swapper: StateSwapper, groups: List[str], update) -> int:
    """Double-buffered sweep: one page is updated while the other is being read."""
    front = swapper.pages.grab()  # clean: near miss, swapped with back in the loop, both dropped in finally
    if front is None:
        return 0
    back = swapper.pages.grab()  # clean: dropped in finally
    if back is None:
        swapper.pages.drop(front)
        return 0
    done = 0
    try:
        if groups:
            swapper._fill(groups[0], front)
        for i, key in enumerate(groups):
            if i + 1 < len(groups):
                swapper._fill(groups[i + 1], back)
            update(key, swapper.pages.array(front))
            front, back = back, front
            done += 1
    finally:
        swapper.pages.drop(front)
        swapper.pages.drop(back)
    return done


def clip_global(swapper: StateSwapper, keys: List[str], limit: float) -> float:
    total = 0.0
    with ExitStack() as stack:
        page = swapper.pages.grab()  # clean: the exit stack drops it
        if page is None:
            return 0.0
        stack.callback(swapper.pages.drop, page)
        for key in keys:
            if not swapper._fill(key, page):
                continue
            total += float(np.square(swapper.pages.array(page)).sum())
    return min(limit, total**0.5)


def migrate(src: StateSwapper, dst_pages: HostPages, keys: List[str]) -> Dict[str, int]:
    """Copies resident pages into another pool; the caller owns the table it gets."""
    moved: Dict[str, int] = {}
    for key in keys:
        if key in moved:
            continue
        array = src.page_in(key)
        if array is None:
            continue
        page = dst_pages.grab()  # clean: near miss, kept in moved, which is returned or unwound
        if page is None:
            for taken in moved.values():
                dst_pages.drop(taken)
            return {}
        dst_pages.array(page)[:] = array
        moved[key] = page
        src.page_out(key)
    return moved
