"""Transfer engine: moves KV and weight pages between nodes with one-sided writes.

A transfer takes a registered region (MR), a work-request slot of the queue pair and, for
reads, a landing page. Completions come from the poller thread.
"""
from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Optional, Protocol

logger = logging.getLogger(__name__)

OnDone = Callable[["Work", int], None]


class Verbs(Protocol):
    def reg_mr(self, addr: int, length: int) -> int: ...
    def dereg_mr(self, key: int) -> None: ...
    def post_write(self, wr: int, lkey: int, raddr: int) -> int: ...
    def post_read(self, wr: int, lkey: int, raddr: int) -> int: ...
    def flush(self, wr: int) -> int: ...
    def poll(self) -> list[tuple[int, int]]: ...


class RegionCache:
    """Registered regions with user counts; those without users are deregistered lazily."""

    def __init__(self, verbs: Verbs, max_idle: int = 64) -> None:
        self._verbs = verbs
        self._max_idle = max_idle
        self._keys: dict[tuple[int, int], int] = {}
        self._users: dict[tuple[int, int], int] = {}
        self._mu = threading.Lock()

    def hold(self, addr: int, length: int) -> Optional[int]:
        with self._mu:
            span = (addr, length)
            key = self._keys.get(span)
            if key is None:
                key = self._verbs.reg_mr(addr, length)  # clean: a negative key is no region, others are kept in _keys
                if key < 0:
                    return None
                self._keys[span] = key
            self._users[span] = self._users.get(span, 0) + 1
            return key

    def unhold(self, addr: int, length: int) -> None:
        with self._mu:
            self._users[(addr, length)] -= 1
            idle = [s for s, n in self._users.items() if n == 0]
            for span in idle[self._max_idle:]:
                del self._users[span]
                self._verbs.dereg_mr(self._keys.pop(span))


class PageStock:
    def __init__(self, base: int, page: int, count: int) -> None:
        self.page = page
        self._free: deque[int] = deque(base + i * page for i in range(count))
        self._mu = threading.Lock()

    def draw(self) -> Optional[int]:
        with self._mu:
            return self._free.popleft() if self._free else None  # clean: handed to the caller

    def restock(self, addr: int) -> None:
        with self._mu:
            self._free.append(addr)

    def draw_contiguous(self, n: int) -> Optional[list[int]]:
        with self._mu:
            run: list[int] = []
            skipped: list[int] = []
            while self._free and len(run) < n:
                addr = self._free.popleft()  # clean: near miss, skipped pages and an unfinished run go back before the return
                if run and addr != run[-1] + self.page:
                    skipped.extend(run)
                    run = []
                run.append(addr)
            self._free.extend(skipped)
            if len(run) < n:
                self._free.extend(run)
                return None
            return run


class WrSlots:
    def __init__(self, depth: int) -> None:
        self._ring = deque(range(depth))
        self._cv = threading.Condition()

    def next(self, timeout: Optional[float] = None) -> int:
        with self._cv:
            if not self._cv.wait_for(lambda: self._ring, timeout):
                return -1
            return self._ring.popleft()  # clean: handed to the caller

    def recycle(self, wr: int) -> None:
        with self._cv:
            self._ring.append(wr)
            self._cv.notify()


@dataclass
class Work:
    wr: int
    span: tuple[int, int]
    page: Optional[int]
    done: Optional[OnDone]


class Engine:
    def __init__(self, verbs: Verbs, regions: RegionCache, pages: PageStock, depth: int = 128) -> None:
        self._verbs = verbs
        self._regions = regions
        self._pages = pages
        self._slots = WrSlots(depth)
        self._work: dict[int, Work] = {}
        self.stopping = False

    # -- posting ---------------------------------------------------------
    def write(self, addr: int, length: int, raddr: int, done: Optional[OnDone] = None) -> bool:
        lkey = self._regions.hold(addr, length)  # leak: still held when no work-request slot comes free
        if lkey is None:
            return False
        wr = self._slots.next(timeout=1.0)  # clean: near miss, recycled on a failed post, else by poll_once through _work
        if wr < 0:
            return False
        self._work[wr] = Work(wr, (addr, length), None, done)
        if self._verbs.post_write(wr, lkey, raddr) != 0:
            self._complete(wr, -1)
            return False
        return True

    def read(self, raddr: int, done: OnDone) -> bool:
        """The callback owns the landing page and must restock it."""
        page = self._pages.draw()  # leak: not restocked when the page cannot be registered
        if page is None:
            return False
        lkey = self._regions.hold(page, self._pages.page)  # clean: unheld without a slot, else by _complete
        if lkey is None:
            return False
        wr = self._slots.next(timeout=1.0)  # clean: moved into _work, from which _complete recycles
        if wr < 0:
            self._regions.unhold(page, self._pages.page)
            self._pages.restock(page)
            return False
        work = self._work[wr] = Work(wr, (page, self._pages.page), page, done)
        if self._verbs.post_read(wr, lkey, raddr) != 0:
            logger.error("post_read failed on wr %d", work.wr)
            self._complete(wr, -1)
            return False
        return True

    def _complete(self, wr: int, status: int) -> None:
        work = self._work.pop(wr)
        self._regions.unhold(*work.span)
        self._slots.recycle(wr)
        if work.done is not None:
            work.done(work, status)
        elif work.page is not None:
            self._pages.restock(work.page)

    def poll_once(self) -> int:
        events = self._verbs.poll()
        for wr, status in events:
            self._complete(wr, status)
        return len(events)

    # -- composed operations ---------------------------------------------
    def fence(self) -> bool:
        wr = self._slots.next()  # leak: a failed flush returns before recycle
        if self._verbs.flush(wr) != 0:
            return False
        self._slots.recycle(wr)
        return True

    def scratch_copy(self, src: bytes, n_pages: int) -> Optional[list[int]]:
        pages = self._pages.draw_contiguous(n_pages)  # clean: near miss, restocked when src is too long, else the caller's
        if pages is None:
            return None
        if len(src) > n_pages * self._pages.page:
            for p in pages:
                self._pages.restock(p)
            raise ValueError("source is too long")
        return pages

    def stage(self, src: bytes, raddr: int) -> bool:
        pages = self.scratch_copy(src, 4)  # leak: the pages are restocked only if every write was accepted
        if pages is None:
            return False
        for i, p in enumerate(pages):
            if not self.write(p, self._pages.page, raddr + i * self._pages.page):
                return False
        while self._work:
            self.poll_once()
        for p in pages:
            self._pages.restock(p)
        return True


class Puller:
    """Pulls remote pages and feeds their bytes to a sink."""

    def __init__(self, engine: Engine, pages: PageStock, sink: Callable[[int], bool]) -> None:
        self.engine = engine
        self.pages = pages
        self.sink = sink
        self.failed = 0

    def _landed(self, work: Work, status: int) -> None:
        if status != 0:
            self.failed += 1
        else:
            self.sink(work.page)
        self.pages.restock(work.page)

    def pull(self, raddrs: list[int]) -> None:
        for r in raddrs:
            while not self.engine.read(r, self._landed):
                self.engine.poll_once()
