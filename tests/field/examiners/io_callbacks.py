"""Asynchronous page writes, completed through callbacks on an executor."""
from __future__ import annotations

import functools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Dict, List, Optional


class Credit:
    def __init__(self, number: int):
        self.number = number


class CreditPool:
    """Limits the writes in flight."""

    def __init__(self, n: int):
        self._lock = threading.Lock()
        self._spare: List[Credit] = [Credit(i) for i in range(n)]

    def obtain(self) -> Optional[Credit]:
        with self._lock:
            return self._spare.pop() if self._spare else None  # clean: handed to the caller

    def repay(self, credit: Credit) -> None:
        with self._lock:
            self._spare.append(credit)


Writer = Callable[[int, bytes], int]


class AsyncWriter:
    def __init__(self, write: Writer, credits: CreditPool):
        self.write = write
        self.credits = credits
        self.executor = ThreadPoolExecutor(max_workers=4)
        self.inflight: Dict[int, Credit] = {}
        self.failed: List[int] = []

    def submit(self, page: int, data: bytes) -> bool:
        credit = self.credits.obtain()  # clean: near miss, repaid by the lambda whatever the outcome of the future
        if credit is None:
            return False
        fut = self.executor.submit(self.write, page, data)
        fut.add_done_callback(lambda _f: self.credits.repay(credit))
        return True

    def submit_checked(self, page: int, data: bytes) -> bool:
        credit = self.credits.obtain()  # leak: the callback repays only after success
        if credit is None:
            return False
        fut = self.executor.submit(self.write, page, data)
        fut.add_done_callback(functools.partial(self._on_checked, page, credit))
        return True

    def _on_checked(self, page: int, credit: Credit, fut: "Future[int]") -> None:
        if fut.exception() is not None:
            self.failed.append(page)
            return
        self.credits.repay(credit)

    def submit_logged(self, page: int, data: bytes) -> bool:
        credit = self.credits.obtain()  # clean: near miss, the callback repays before it looks at the error
        if credit is None:
            return False
        fut = self.executor.submit(self.write, page, data)
        fut.add_done_callback(functools.partial(self._on_logged, page, credit))
        return True

    def _on_logged(self, page: int, credit: Credit, fut: "Future[int]") -> None:
        self.credits.repay(credit)
        if fut.exception() is not None:
            self.failed.append(page)
            return

    def submit_tracked(self, page: int, data: bytes) -> bool:
        if page in self.inflight:
            return False
        credit = self.credits.obtain()  # clean: near miss, stored under an unused page, the callback takes it out again
        if credit is None:
            return False
        self.inflight[page] = credit
        fut = self.executor.submit(self.write, page, data)
        fut.add_done_callback(lambda _f: self._settle(page))
        return True

    def _settle(self, page: int) -> None:
        credit = self.inflight.pop(page, None)
        if credit is not None:
            self.credits.repay(credit)

    def submit_small(self, page: int, data: bytes) -> bool:
        credit = self.credits.obtain()  # leak: the inline path of small data repays nothing
        if credit is None:
            return False
        if len(data) < 512:
            return self.write(page, data) == len(data)
        fut = self.executor.submit(self.write, page, data)
        fut.add_done_callback(lambda _f: self.credits.repay(credit))
        return True

    def submit_inline(self, page: int, data: bytes) -> bool:
        credit = self.credits.obtain()  # clean: near miss, the inline path repays itself
        if credit is None:
            return False
        if len(data) < 512:
            written = self.write(page, data)
            self.credits.repay(credit)
            return written == len(data)
        fut = self.executor.submit(self.write, page, data)
        fut.add_done_callback(lambda _f: self.credits.repay(credit))
        return True

    def close(self) -> None:
        self.executor.shutdown(wait=True)


class Completion:
    """Collects a batch and fires a hook once all parts have arrived."""

    def __init__(self, expected: int, hook: Optional[Callable[[], None]] = None):
        self.expected = expected
        self.hook = hook
        self.arrived = 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.expected and self.hook is not None:
            self.hook()


def batch_with_hook(credits: CreditPool, parts: List[Callable[[], None]]) -> bool:
    if not parts:
        return True
    credit = credits.obtain()  # clean: near miss, parts is not empty so that the hook fires with the last one
    if credit is None:
        return False
    done = Completion(len(parts), functools.partial(credits.repay, credit))
    for part in parts:
        part()
        done.arrive()
    return True


def batch_plain(credits: CreditPool, parts: List[Callable[[], None]]) -> bool:
    credit = credits.obtain()  # leak: with no parts nothing arrives and the hook that repays never fires
    if credit is None:
        return False
    done = Completion(len(parts), functools.partial(credits.repay, credit))
    for part in parts:
        part()
        done.arrive()
    return True


def batch_counted(credits: CreditPool, parts: List[Callable[[], None]]) -> int:
    credit = credits.obtain()  # leak: the completion is made without a hook, nobody repays
    if credit is None:
        return 0
    done = Completion(len(parts))
    for part in parts:
        part()
        done.arrive()
    return done.arrived
