"""Rollout job queue with claims.

A claimed job is invisible to other workers until it is acked, nacked or
buried.  There is no visibility timeout on this backend, so a claim that is
never settled keeps its job (and its slot in `inflight_limit`) for good.
"""
from __future__ import annotations

import heapq
import itertools
import json
import logging
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional

log = logging.getLogger("jobs")


@dataclass(order=True)
class Job:
    prio: int
    seq: int
    kind: str = field(compare=False)
    body: str = field(compare=False)
    attempts: int = field(default=0, compare=False)
    not_before: float = field(default=0.0, compare=False)


class Broker:
    def __init__(self, inflight_limit: int = 64) -> None:
        self._heap: List[Job] = []
        self._claimed: Dict[int, Job] = {}
        self._dead: List[Job] = []
        self._seq = itertools.count()
        self._mu = threading.Lock()
        self.inflight_limit = inflight_limit

    def enqueue(self, kind: str, payload: Any, prio: int = 10) -> int:
        job = Job(prio, next(self._seq), kind, json.dumps(payload))
        with self._mu:
            heapq.heappush(self._heap, job)
        return job.seq

    def claim(self) -> Optional[Job]:
        with self._mu:
            if not self._heap or len(self._claimed) >= self.inflight_limit:
                return None
            job = heapq.heappop(self._heap)  # clean: recorded as claimed and returned
            self._claimed[job.seq] = job
            return job

    def claim_kind(self, kind: str) -> Optional[Job]:
        with self._mu:
            rest: List[Job] = []
            found = None
            while self._heap and found is None:
                job = heapq.heappop(self._heap)  # clean: near miss, other kinds are pushed back from rest
                if job.kind == kind:
                    found = job
                else:
                    rest.append(job)
            for other in rest:
                heapq.heappush(self._heap, other)
            if found is not None:
                self._claimed[found.seq] = found
            return found

    def claim_due(self, now: float) -> Optional[Job]:
        with self._mu:
            while self._heap:
                job = heapq.heappop(self._heap)  # leak: jobs that are not due yet are popped and forgotten
                if job.not_before <= now:
                    self._claimed[job.seq] = job
                    return job
        return None

    def ack(self, job: Job) -> None:
        with self._mu:
            self._claimed.pop(job.seq, None)

    def nack(self, job: Job, delay: float = 0.0) -> None:
        with self._mu:
            if self._claimed.pop(job.seq, None) is not None:
                job.attempts += 1
                job.not_before = delay
                heapq.heappush(self._heap, job)

    def bury(self, job: Job) -> None:
        with self._mu:
            if self._claimed.pop(job.seq, None) is not None:
                self._dead.append(job)


Handler = Callable[[Any], bool]


class Worker:
    def __init__(self, broker: Broker, max_attempts: int = 3) -> None:
        self.broker = broker
        self.max_attempts = max_attempts
        self.handlers: Dict[str, Handler] = {}
        self.current: Optional[Job] = None
        self.focus: Optional[Job] = None
        self.stopping = False

    def on(self, kind: str) -> Callable[[Handler], Handler]:
        def deco(fn: Handler) -> Handler:
            self.handlers[kind] = fn
            return fn
        return deco

    def run_once(self) -> bool:
        job = self.broker.claim()  # leak: a job of an unregistered kind is never settled
        if job is None:
            return False
        handler = self.handlers.get(job.kind)
        if handler is None:
            log.error("no handler for %s", job.kind)
            return False
        self._settle(job, handler(json.loads(job.body)))
        return True

    def _settle(self, job: Job, ok: bool) -> None:
        if ok:
            self.broker.ack(job)
        elif job.attempts + 1 >= self.max_attempts:
            self.broker.bury(job)
        else:
            self.broker.nack(job)

    def run_guarded(self) -> bool:
        job = self.broker.claim()  # clean: near miss, the handler's error counts as a failed attempt in _settle()
        if job is None:
            return False
        ok = False
        try:
            handler = self.handlers.get(job.kind)
            ok = handler is not None and handler(json.loads(job.body))
        except Exception:
            log.exception("job %d", job.seq)
        self._settle(job, ok)
        return ok

    def run_until_idle(self) -> int:
        done = 0
        while True:
            job = self.broker.claim()  # leak: the stopping check returns with the job just claimed
            if job is None or self.stopping:
                return done
            handler = self.handlers.get(job.kind)
            self._settle(job, bool(handler and handler(json.loads(job.body))))
            done += 1

    # -- manual stepping, used by the debugger -------------------------------

    def step_in(self) -> Optional[Job]:
        if self.current is None:
            self.current = self.broker.claim()  # clean: kept in self.current until step_out()
        return self.current

    def step_out(self, ok: bool) -> None:
        job, self.current = self.current, None
        if job is not None:
            self._settle(job, ok)

    def focus_on(self, kind: str) -> Optional[Job]:
        self.focus = self.broker.claim_kind(kind)  # leak: called again before unfocus() it overwrites the held claim
        return self.focus

    def unfocus(self) -> None:
        job, self.focus = self.focus, None
        if job is not None:
            self.broker.nack(job)


class BatchClaimer:
    """Groups claims so that one forward pass can serve many jobs."""

    def __init__(self, broker: Broker, width: int) -> None:
        self.broker = broker
        self.width = width
        self.by_kind: Dict[str, List[Job]] = {}

    def gather(self) -> List[Job]:
        batch: List[Job] = []
        while len(batch) < self.width:
            job = self.broker.claim()  # clean: the batch goes to the caller
            if job is None:
                break
            batch.append(job)
        return batch

    def gather_full(self) -> Optional[List[Job]]:
        batch = self.gather()  # clean: an incomplete batch is nacked job by job
        if len(batch) == self.width:
            return batch
        for job in batch:
            self.broker.nack(job)
        return None

    def gather_uniform(self, kind: str) -> List[Job]:
        batch: List[Job] = []
        for job in self.gather():  # leak: jobs of another kind are filtered out without nack
            if job.kind == kind:
                batch.append(job)
        return batch

    def fill_table(self) -> int:
        jobs = self.gather()  # clean: near miss, filed in by_kind, which flush() settles completely
        for job in jobs:
            self.by_kind.setdefault(job.kind, []).append(job)
        return len(jobs)

    def flush(self, forward: Callable[[str, List[str]], List[bool]]) -> int:
        acked = 0
        while self.by_kind:
            kind, jobs = self.by_kind.popitem()
            verdicts = forward(kind, [j.body for j in jobs])
            for i, job in enumerate(jobs):
                if i < len(verdicts) and verdicts[i]:
                    self.broker.ack(job)
                    acked += 1
                else:
                    self.broker.nack(job)
        return acked


def stream_jobs(broker: Broker, kind: str) -> Iterator[Any]:
    """Yield payloads; the job is acked when the consumer asks for the next."""
    while True:
        job = broker.claim_kind(kind)  # clean: near miss, settled in finally even if the generator is closed
        if job is None:
            return
        done = False
        try:
            yield json.loads(job.body)
            done = True
        finally:
            if done:
                broker.ack(job)
            else:
                broker.nack(job)


def transfer(src: Broker, dst: Broker, limit: int) -> int:
    moved = 0
    while moved < limit:
        job = src.claim()  # clean: acked at the source once the copy is queued
        if job is None:
            break
        dst.enqueue(job.kind, json.loads(job.body), job.prio)
        src.ack(job)
        moved += 1
    return moved


def purge(broker: Broker, kind: str, keep: Callable[[Job], bool]) -> int:
    """Delete jobs of a kind unless keep(job)."""
    gone = 0
    kept: List[Job] = []
    while True:
        job = broker.claim_kind(kind)  # leak: the kept ones are only nacked when something was deleted
        if job is None:
            break
        if keep(job):
            kept.append(job)
        else:
            broker.ack(job)
            gone += 1
    if not gone:
        return 0
    for job in kept:
        broker.nack(job)
    return gone
