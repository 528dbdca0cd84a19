"""Thread-pool front with worker slots, quotas, completion callbacks and a lease table."""
from __future__ import annotations

import concurrent.futures as cf
import logging
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

logger = logging.getLogger("workers")


@dataclass(eq=False)
class WorkerSlot:
    lane: int
    since: float = 0.0


class SlotBook:
    """Lanes 0..n-1, kept as a counter per lane; each lane carries `width` jobs."""

    def __init__(self, lanes: int, width: int):
        self.load = [0] * lanes
        self.width = width
        self._mu = threading.Lock()

    def occupy(self) -> Optional[WorkerSlot]:
        with self._mu:
            lane = min(range(len(self.load)), key=self.load.__getitem__)
            if self.load[lane] >= self.width:
                return None
            self.load[lane] += 1
            return WorkerSlot(lane, time.monotonic())

    def vacate(self, slot: WorkerSlot) -> None:
        with self._mu:
            self.load[slot.lane] -= 1


class QuotaBook:
    """Wraps a SlotBook and holds each user to a quota."""

    def __init__(self, book: SlotBook, quota: int):
        self.book = book
        self.quota = quota
        self.by_user: Dict[str, int] = {}

    def occupy_for(self, user: str) -> Optional[WorkerSlot]:
        slot = self.book.occupy()  # clean: vacated when over quota, else returned
        if slot is None:
            return None
        if self.by_user.get(user, 0) >= self.quota:
            self.book.vacate(slot)
            return None
        self.by_user[user] = self.by_user.get(user, 0) + 1
        return slot

    def vacate_for(self, user: str, slot: WorkerSlot) -> None:
        self.by_user[user] -= 1
        self.book.vacate(slot)


class AuditedBook:
    """Wraps a QuotaBook; users on the deny list get nothing."""

    def __init__(self, quota: QuotaBook, denied: set[str]):
        self.quota = quota
        self.denied = denied

    def occupy_for(self, user: str) -> Optional[WorkerSlot]:
        slot = self.quota.occupy_for(user)  # leak: a denied user is refused after the slot was taken
        if slot is None:
            return None
        if user in self.denied:
            logger.warning("denied %s", user)
            return None
        return slot

    def vacate_for(self, user: str, slot: WorkerSlot) -> None:
        self.quota.vacate_for(user, slot)


class Front:
    def __init__(self, book: SlotBook, threads: int):
        self.book = book
        self.exec = cf.ThreadPoolExecutor(threads)

    def submit(self, fn: Callable[..., Any], *args: Any) -> Optional[cf.Future]:
        slot = self.book.occupy()  # leak: an executor that is shut down refuses the job and the slot stays occupied
        if slot is None:
            return None
        try:
            fut = self.exec.submit(fn, *args)
        except RuntimeError:
            logger.info("executor is shut down")
            return None
        fut.add_done_callback(lambda _f: self.book.vacate(slot))
        return fut

    def submit_checked(self, fn: Callable[..., Any], *args: Any) -> Optional[cf.Future]:
        slot = self.book.occupy()  # clean: near miss, vacated by the handler or by the done callback
        if slot is None:
            return None
        try:
            fut = self.exec.submit(fn, *args)
        except RuntimeError:
            self.book.vacate(slot)
            return None
        fut.add_done_callback(lambda _f: self.book.vacate(slot))
        return fut

    def submit_logged(self, fn: Callable[..., Any], on_value: Callable[[Any], None]) -> Optional[cf.Future]:
        slot = self.book.occupy()  # leak: the callback returns before vacate when the job failed
        if slot is None:
            return None

        def finished(f: cf.Future) -> None:
            err = f.exception()
            if err is not None:
                logger.error("job failed: %s", err)
                return
            on_value(f.result())
            self.book.vacate(slot)

        fut = self.exec.submit(fn)
        fut.add_done_callback(finished)
        return fut

    def run_here(self, fn: Callable[[int], Any]) -> Any:
        slot = self.book.occupy()  # clean: vacated in finally
        if slot is None:
            raise BlockingIOError("all lanes are busy")
        try:
            return fn(slot.lane)
        finally:
            self.book.vacate(slot)

    def run_when_free(self, fn: Callable[[int], Any], tries: int) -> Optional[Any]:
        slot = None
        for _ in range(tries):
            slot = self.book.occupy()  # clean: near miss, the loop ends at the first slot got
            if slot is not None:
                break
            time.sleep(0.01)
        if slot is None:
            return None
        try:
            return fn(slot.lane)
        finally:
            self.book.vacate(slot)

    def run_on_lane(self, lane: int, fn: Callable[[], Any]) -> Optional[Any]:
        slot = self.book.occupy()  # leak: rebound in the loop while a slot of another lane is held
        while slot is not None and slot.lane != lane:
            slot = self.book.occupy()  # leak: slots of other lanes are passed over without vacate
        if slot is None:
            return None
        try:
            return fn()
        finally:
            self.book.vacate(slot)


class LeaseTable:
    """Slots leased to remote workers under a token with a time to live."""

    def __init__(self, book: SlotBook, ttl: float):
        self.book = book
        self.ttl = ttl
        self.rows: Dict[str, Tuple[WorkerSlot, float]] = {}
        self.trial: Dict[str, Tuple[WorkerSlot, float]] = {}

    def enter(self) -> Optional[str]:
        slot = self.book.occupy()  # clean: near miss, the row is vacated by leave() or by reap()
        if slot is None:
            return None
        token = uuid.uuid4().hex
        self.rows[token] = (slot, time.monotonic() + self.ttl)
        return token

    def enter_trial(self) -> Optional[str]:
        slot = self.book.occupy()  # leak: reap() deletes expired trial rows without a vacate
        if slot is None:
            return None
        token = "trial-" + uuid.uuid4().hex
        self.trial[token] = (slot, time.monotonic() + self.ttl / 10)
        return token

    def renew(self, token: str) -> bool:
        row = self.rows.get(token)
        if row is None:
            return False
        self.rows[token] = (row[0], time.monotonic() + self.ttl)
        return True

    def leave(self, token: str) -> None:
        row = self.rows.pop(token, None) or self.trial.pop(token, None)
        if row is not None:
            self.book.vacate(row[0])

    def reap(self) -> int:
        now = time.monotonic()
        late = [t for t, (_, due) in self.rows.items() if due < now]
        for t in late:
            slot, _ = self.rows.pop(t)
            self.book.vacate(slot)
        for t in [t for t, (_, due) in self.trial.items() if due < now]:
            del self.trial[t]
        return len(late)
