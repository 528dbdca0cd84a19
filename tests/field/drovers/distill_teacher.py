"""Teacher logits for distillation: cached pages, shared between students by lease, filled by a thread pool."""
from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

log = logging.getLogger(__name__)


@dataclass
class LogitsPage:
    number: int
    values: List[float] = field(default_factory=list)
    filled: bool = False


class PageCache:
    def __init__(self, pages: int):
        self._cold = [LogitsPage(i) for i in range(pages)]
        self._lock = threading.Lock()
        self.lent = 0

    def lend(self) -> Optional[LogitsPage]:
        with self._lock:
            if not self._cold:
                return None
            self.lent += 1
            return self._cold.pop()

    def recall(self, page: LogitsPage) -> None:
        page.values = []
        page.filled = False
        with self._lock:
            self.lent -= 1
            self._cold.append(page)


class LogitsLease:
    """A page together with the knowledge of whether it has to go back."""

    def __init__(self, cache: PageCache, page: LogitsPage, owned: bool):
        self.cache = cache
        self.page = page
        self.owned = owned

    def close(self) -> None:
        if self.owned:
            self.owned = False
            self.cache.recall(self.page)

    def __enter__(self) -> "LogitsLease":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class Teacher:
    def __init__(self, cache: PageCache, model: Callable[[float], float], workers: int = 2):
        self.cache = cache
        self.model = model
        self.executor = ThreadPoolExecutor(workers)
        self._promised: Dict[int, "Future[LogitsPage]"] = {}
        self._gate = threading.Lock()

    def _fill(self, page: LogitsPage, xs: List[float]) -> LogitsPage:
        page.values = [self.model(x) for x in xs]
        page.filled = True
        return page

    def lease(self, xs: List[float], shared: Optional[LogitsPage] = None) -> Optional[LogitsLease]:
        if shared is not None:
            return LogitsLease(self.cache, shared, owned=False)
        page = self.cache.lend()  # clean: near miss, the lease recalls it because it is marked as owned
        if page is None:
            return None
        return LogitsLease(self.cache, self._fill(page, xs), owned=True)

    def lease_cached(self, xs: List[float], hot: Dict[int, LogitsPage], key: int) -> Optional[LogitsLease]:
        hit = hot.get(key)
        page = hit if hit is not None else self.cache.lend()  # leak: the new page's lease is not marked as owned and the table does not get it either
        if page is None:
            return None
        if hit is None:
            self._fill(page, xs)
        return LogitsLease(self.cache, page, owned=False)

    def promise(self, key: int, xs: List[float]) -> bool:
        if key in self._promised:
            return True
        page = self.cache.lend()  # clean: near miss, redeem takes it out of the future and forget recalls by callback
        if page is None:
            return False
        self._promised[key] = self.executor.submit(self._fill, page, xs)
        return True

    def redeem(self, key: int) -> LogitsPage:
        """The page is the caller's from here on."""
        return self._promised.pop(key).result()

    def forget(self, key: int) -> None:
        fut = self._promised.pop(key, None)
        if fut is not None:
            fut.add_done_callback(lambda f: self.cache.recall(f.result()))

    def prefetch(self, batches: List[List[float]]) -> int:
        """Best effort; the pages come back through the callback."""
        started = 0
        for xs in batches:
            page = self.cache.lend()  # leak: the break of an empty batch comes before the callback is added
            if page is None:
                break
            if not xs:
                break
            fut = self.executor.submit(self._fill, page, xs)
            fut.add_done_callback(lambda f: self.cache.recall(f.result()))
            started += 1
        return started

    def exclusive(self, fn: Callable[[], float], wait: bool = True) -> Optional[float]:
        got = self._gate.acquire(blocking=wait)  # clean: near miss, released exactly where it was got
        try:
            return fn() if got else None
        finally:
            if got:
                self._gate.release()

    def calibrate(self, xs: List[float]) -> float:
        if not self._gate.acquire(timeout=1.0):  # leak: a division by zero is survived with the gate held
            return 1.0
        try:
            scale = len(xs) / sum(self.model(x) for x in xs)
        except ZeroDivisionError:
            log.warning("cannot calibrate on a zero batch")
            return 1.0
        self._gate.release()
        return scale


class Student:
    def __init__(self, teacher: Teacher):
        self.teacher = teacher
        self.weight = 1.0
        self._held: Optional[LogitsLease] = None

    def loss(self, xs: List[float], shared: Optional[LogitsPage] = None) -> float:
        lease = self.teacher.lease(xs, shared)  # clean: with lease closes it
        if lease is None:
            return 0.0
        with lease:
            return sum((self.weight * x - t) ** 2 for x, t in zip(xs, lease.page.values))

    def loss_promised(self, key: int, xs: List[float]) -> float:
        page = self.teacher.redeem(key)  # leak: the loss is computed and the page dropped
        return sum((self.weight * x - t) ** 2 for x, t in zip(xs, page.values))

    def hold(self, xs: List[float]) -> None:
        if self._held is not None:
            self._held.close()
        self._held = self.teacher.lease(xs)  # clean: near miss, the former one was closed just before

    def drop(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def agreement(self, xs: List[float]) -> Optional[float]:
        lease = self.teacher.lease(xs)  # leak: closed only when the page was filled with something
        if lease is None:
            return None
        hits = sum(1 for x, t in zip(xs, lease.page.values) if abs(self.weight * x - t) < 0.5)
        if not lease.page.values:
            return None
        lease.close()
        return hits / len(xs)
