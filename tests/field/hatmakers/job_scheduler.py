"""Thread based job scheduler: jobs claim a worker slot, optionally a licence, and vacate on completion."""
from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Callable, Optional

log = logging.getLogger("jobs")


class State(Enum):
    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"


class SlotTable:
    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._used = [False] * count

    def claim(self) -> int:
        """Number of a free slot, or -1."""
        with self._lock:
            for number, used in enumerate(self._used):
                if not used:
                    self._used[number] = True
                    return number
            return -1

    def vacate(self, number: int) -> None:
        with self._lock:
            self._used[number] = False

    def busy(self) -> int:
        with self._lock:
            return sum(self._used)


class Licences:
    """Counted licences by product name."""

    def __init__(self, counts: dict[str, int]) -> None:
        self._lock = threading.Lock()
        self._counts = dict(counts)

    def draw(self, product: str) -> bool:
        with self._lock:
            if self._counts.get(product, 0) <= 0:
                return False
            self._counts[product] -= 1
            return True

    def restock(self, product: str) -> None:
        with self._lock:
            self._counts[product] += 1


@dataclass
class Job:
    ident: int
    work: Callable[[], Any]
    product: Optional[str] = None
    state: State = State.NEW
    slot: int = -1
    attempts: int = 0
    notes: list[str] = field(default_factory=list)


class Scheduler:
    def __init__(self, slots: SlotTable, licences: Licences, executor: ThreadPoolExecutor) -> None:
        self.slots = slots
        self.licences = licences
        self._executor = executor
        self._jobs: dict[int, Job] = {}
        self._reserved: list[int] = []

    # fire and forget ---------------------------------------------------------------------------------------
    def submit(self, job: Job) -> Optional[Future]:
        number = self.slots.claim()  # clean: near miss, the done callback vacates
        if number < 0:
            return None
        job.slot = number
        job.state = State.RUNNING
        future = self._executor.submit(job.work)
        future.add_done_callback(lambda _: self._completed(job, number))
        return future

    def _completed(self, job: Job, number: int) -> None:
        job.state = State.DONE
        self.slots.vacate(number)
        job.slot = -1

    def submit_logged(self, job: Job) -> Optional[Future]:
        number = self.slots.claim()  # leak: the callback only writes a note, nobody vacates this number
        if number < 0:
            return None
        future = self._executor.submit(job.work)
        future.add_done_callback(lambda _: job.notes.append(f"slot {number} finished"))
        return future

    # in the calling thread ---------------------------------------------------------------------------------
    def run_now(self, job: Job) -> Any:
        number = self.slots.claim()  # leak: a job that is done already returns with the slot claimed
        if number < 0:
            return None
        if job.state is State.DONE:
            log.info("job %d ran before", job.ident)
            return None
        result = job.work()
        job.state = State.DONE
        self.slots.vacate(number)
        return result

    def run_checked(self, job: Job) -> Any:
        if job.state is State.DONE:
            return None
        number = self.slots.claim()  # clean: vacated in finally
        if number == -1:
            log.info("no slot for job %d", job.ident)
            return None
        try:
            result = job.work()
            job.state = State.DONE
            return result
        finally:
            self.slots.vacate(number)

    def run_licensed(self, job: Job) -> bool:
        number = self.slots.claim()  # clean: vacated on the way without a licence and at the end
        if number < 0:
            return False
        if job.product is not None and not self.licences.draw(job.product):  # clean: near miss, correlated restock
            self.slots.vacate(number)
            return False
        job.work()
        if job.product is not None:
            self.licences.restock(job.product)
        self.slots.vacate(number)
        return True

    def run_exclusive(self, job: Job, product: str) -> bool:
        if not self.licences.draw(product):  # leak: no free slot returns with the licence drawn
            return False
        number = self.slots.claim()  # clean: vacated after the work
        if number < 0:
            job.notes.append("no slot")
            return False
        job.work()
        self.slots.vacate(number)
        self.licences.restock(product)
        return True

    def run_with_retry(self, job: Job, limit: int = 3) -> bool:
        while job.attempts < limit:
            job.attempts += 1
            number = self.slots.claim()  # leak: an unsuccessful attempt continues and claims another slot
            if number < 0:
                time.sleep(0.1)
                continue
            if not job.work():
                log.info("job %d attempt %d gave nothing", job.ident, job.attempts)
                continue
            self.slots.vacate(number)
            return True
        return False

    def run_until(self, job: Job, deadline: float) -> bool:
        while time.monotonic() < deadline:
            number = self.slots.claim()  # clean: near miss, vacated before the outcome is examined
            if number < 0:
                time.sleep(0.05)
                continue
            outcome = job.work()
            self.slots.vacate(number)
            if outcome:
                return True
        return False

    # stepwise jobs -----------------------------------------------------------------------------------------
    def start(self, job: Job) -> bool:
        if job.ident in self._jobs:
            return False
        job.slot = self.slots.claim()  # clean: near miss, pause() or finish() vacates and resets the number
        if job.slot < 0:
            return False
        job.state = State.RUNNING
        self._jobs[job.ident] = job
        return True

    def pause(self, ident: int) -> None:
        job = self._jobs[ident]
        if job.state is State.RUNNING:
            self.slots.vacate(job.slot)
            job.slot = -1
            job.state = State.PAUSED

    def resume(self, ident: int) -> bool:
        job = self._jobs[ident]
        if job.state is not State.PAUSED:
            return False
        number = self.slots.claim()  # clean: near miss, stored for finish()
        if number < 0:
            return False
        job.slot = number
        job.state = State.RUNNING
        return True

    def finish(self, ident: int) -> None:
        job = self._jobs.pop(ident)
        if job.slot >= 0:
            self.slots.vacate(job.slot)
        job.state = State.DONE
        job.slot = -1

    # reservations ------------------------------------------------------------------------------------------
    def reserve(self, count: int) -> int:
        for _ in range(count):
            number = self.slots.claim()  # clean: near miss, unreserve() vacates the list
            if number < 0:
                break
            self._reserved.append(number)
        return len(self._reserved)

    def unreserve(self) -> None:
        while self._reserved:
            self.slots.vacate(self._reserved.pop())

    def measure(self, samples: int) -> float:
        """Average time that a claim takes."""
        spent = 0.0
        taken: list[int] = []
        for _ in range(samples):
            before = time.perf_counter()
            number = self.slots.claim()  # leak: the list of the taken ones goes away with the function
            spent += time.perf_counter() - before
            if number < 0:
                break
            taken.append(number)
        return spent / max(1, len(taken))
