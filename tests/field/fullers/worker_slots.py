"""Device slots for a thread pool of model workers; each job runs on one slot."""
from __future__ import annotations

import functools
import itertools
import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

logger = logging.getLogger(__name__)
JobFn = Callable[[int], Any]


class SlotPool:
    def __init__(self, n: int) -> None:
        self._slots: "queue.Queue[int]" = queue.Queue()
        for i in range(n):
            self._slots.put(i)

    def claim(self, timeout: Optional[float] = None) -> Optional[int]:
        try:
            return self._slots.get(timeout=timeout) if timeout != 0 else self._slots.get_nowait()
        except queue.Empty:
            return None

    def vacate(self, slot: int) -> None:
        self._slots.put(slot)

    def idle(self) -> int:
        return self._slots.qsize()


class SlotExecutor:
    def __init__(self, slots: SlotPool, workers: int) -> None:
        self.slots = slots
        self._pool = ThreadPoolExecutor(workers)
        self.stopped = False
        self.failures = 0

    def submit(self, fn: JobFn) -> Future:
        slot = self.slots.claim()  # clean: the future's callback vacates it
        fut = self._pool.submit(fn, slot)
        fut.add_done_callback(lambda _f: self.slots.vacate(slot))
        return fut

    def submit_counted(self, fn: JobFn) -> Future:
        slot = self.slots.claim()  # clean: near miss, passed to the callback by partial and vacated there first
        fut = self._pool.submit(fn, slot)
        fut.add_done_callback(functools.partial(self._finish, slot))
        return fut

    def _finish(self, slot: int, fut: Future) -> None:
        self.slots.vacate(slot)
        if fut.cancelled():
            return
        if fut.exception() is not None:
            self.failures += 1

    def submit_notify(self, fn: JobFn, notify: Callable[[Any], None]) -> Future:
        slot = self.slots.claim()  # leak: the callback returns without vacating when the job failed

        def on_done(fut: Future) -> None:
            if fut.exception() is not None:
                self.failures += 1
                return
            notify(fut.result())
            self.slots.vacate(slot)

        fut = self._pool.submit(fn, slot)
        fut.add_done_callback(on_done)
        return fut

    def map_tolerant(self, fns: Sequence[JobFn]) -> List[Any]:
        pending: List[Tuple[int, Future]] = []
        for fn in fns:
            slot = self.slots.claim()  # leak: the slot of a failed job is skipped when the results are collected
            pending.append((slot, self._pool.submit(fn, slot)))
        results: List[Any] = []
        for slot, fut in pending:
            try:
                results.append(fut.result())
            except ValueError as exc:
                logger.warning("job on slot %d: %s", slot, exc)
                continue
            self.slots.vacate(slot)
        return results

    def run_pair(self, fn: Callable[[int, int], Any]) -> Any:
        first = self.slots.claim(timeout=1.0)  # clean: vacated when there is no second and at the end
        if first is None:
            return None
        second = self.slots.claim(timeout=0)  # clean: vacated by the finally
        if second is None:
            self.slots.vacate(first)
            return None
        try:
            return fn(first, second)
        finally:
            self.slots.vacate(second)
            self.slots.vacate(first)

    def quarantine(self, seconds: float) -> bool:
        slot = self.slots.claim(timeout=0)  # clean: near miss, the timer vacates it
        if slot is None:
            return False
        timer = threading.Timer(seconds, self.slots.vacate, args=(slot,))
        timer.start()
        return True

    def run_inline(self, fn: JobFn) -> Any:
        slot = self.slots.claim(timeout=0)  # leak: a stopped executor returns with the slot claimed
        if slot is None:
            return fn(-1)
        if self.stopped:
            return None
        try:
            return fn(slot)
        finally:
            self.slots.vacate(slot)

    def shutdown(self) -> None:
        self.stopped = True
        self._pool.shutdown(wait=True)


@dataclass
class Job:
    slot: int
    name: str


class JobTable:
    """Long-running jobs; an entry keeps its slot until the job is completed or cancelled."""

    def __init__(self, slots: SlotPool) -> None:
        self.slots = slots
        self._ids = itertools.count()
        self._jobs: Dict[int, Job] = {}

    def start(self, name: str) -> int:
        jid = next(self._ids)
        self._jobs[jid] = Job(self.slots.claim(), name)  # leak: cancel pops the job and forgets its slot
        return jid

    def complete(self, jid: int) -> str:
        job = self._jobs.pop(jid)
        self.slots.vacate(job.slot)
        return job.name

    def cancel(self, jid: int) -> bool:
        job = self._jobs.pop(jid, None)
        if job is None:
            return False
        logger.info("cancelled %s", job.name)
        return True


class LeaseTable:
    def __init__(self, slots: SlotPool) -> None:
        self.slots = slots
        self._ids = itertools.count()
        self._jobs: Dict[int, Job] = {}

    def start(self, name: str) -> int:
        jid = next(self._ids)
        self._jobs[jid] = Job(self.slots.claim(), name)  # clean: complete and cancel both retire the entry
        return jid

    def _retire(self, jid: int) -> Optional[Job]:
        job = self._jobs.pop(jid, None)
        if job is not None:
            self.slots.vacate(job.slot)
        return job

    def complete(self, jid: int) -> str:
        job = self._retire(jid)
        return job.name if job else ""

    def cancel(self, jid: int) -> bool:
        return self._retire(jid) is not None


def main() -> None:
    slots = SlotPool(4)
    ex = SlotExecutor(slots, 2)
    assert ex.submit(lambda s: s * 0).result() == 0
    ex.submit_counted(lambda s: s).result()
    assert ex.run_pair(lambda a, b: a != b)
    assert ex.quarantine(0.01)
    table = LeaseTable(slots)
    table.complete(table.start("a"))
    assert table.cancel(table.start("b"))
    ex.shutdown()
    threading.Event().wait(0.05)
    assert slots.idle() == 4


if __name__ == "__main__":
    main()
