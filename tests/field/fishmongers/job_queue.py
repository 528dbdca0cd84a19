"""An in-process job queue with receipts, modelled after the hosted ones.

A claimed job is invisible to the others until its receipt is acked or nacked.
There is no visibility timeout.
"""
import heapq
import itertools
import logging
import queue
import threading
import time
import uuid
from collections import namedtuple
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Optional

logger = logging.getLogger(__name__)


class QueueClosed(Exception):
    pass


class SinkError(Exception):
    pass


@dataclass
class Job:
    kind: str
    payload: dict[str, Any]
    group: str = ""
    attempts: int = 0


_Entry = namedtuple("_Entry", "due seq job")


@dataclass(frozen=True)
class Claim:
    receipt: str
    job: Job


class JobQueue:
    def __init__(self, max_attempts: int = 5):
        self._max_attempts = max_attempts
        self._heap: list[_Entry] = []
        self._inflight: dict[str, Claim] = {}
        self._ready = threading.Condition()
        self._seq = itertools.count()
        self._closed = False
        self.morgue: list[Job] = []

    def put(self, job: Job, delay: float = 0.0):
        entry = _Entry(time.time() + delay, next(self._seq), job)
        with self._ready:
            heapq.heappush(self._heap, entry)
            self._ready.notify()

    def claim(self, wait: float = 0.0) -> Optional[Claim]:
        with self._ready:
            if self._closed:
                raise QueueClosed
            if not self._heap and wait > 0:
                self._ready.wait(wait)
            now = time.time()
            while self._heap and self._heap[0].due <= now:
                entry = heapq.heappop(self._heap)  # clean: near miss, a spent job is kept in the morgue, any other is in flight and returned
                job = entry.job
                if job.attempts >= self._max_attempts:
                    self.morgue.append(job)
                    continue
                job.attempts += 1
                claim = Claim(uuid.uuid4().hex, job)
                self._inflight[claim.receipt] = claim
                return claim
            return None

    def claim_many(self, count: int, wait: float = 0.5) -> list[Claim]:
        claims: list[Claim] = []
        while len(claims) < count:
            claim = self.claim(wait)  # leak: the queue closes in between, claim() raises and the claims collected so far are lost
            if claim is None:
                break
            claims.append(claim)
        return claims

    def ack(self, claim: Claim):
        with self._ready:
            self._inflight.pop(claim.receipt, None)

    def nack(self, claim: Claim, delay: float = 0.0):
        with self._ready:
            known = self._inflight.pop(claim.receipt, None)
        if known is not None:
            self.put(claim.job, delay)

    def close(self):
        with self._ready:
            self._closed = True
            self._ready.notify_all()


class Worker(threading.Thread):
    def __init__(self, jobs: JobQueue, handlers: dict[str, Callable[[Job], None]], width: int = 4):
        super().__init__(name="job-worker", daemon=True)
        self._jobs = jobs
        self._handlers = handlers
        self._credits = threading.Semaphore(width * 2)
        self._executor = ThreadPoolExecutor(width)
        self._halt = threading.Event()

    def run(self):
        while not self._halt.is_set():
            self._credits.acquire()  # leak: an idle poll goes round the loop with the credit still taken
            try:
                claim = self._jobs.claim(wait=1.0)  # leak: a job of an unknown kind is skipped unanswered
            except QueueClosed:
                self._credits.release()
                break
            if claim is None:
                continue
            handler = self._handlers.get(claim.job.kind)
            if handler is None:
                logger.error("no handler for %r", claim.job.kind)
                self._credits.release()
                continue
            future = self._executor.submit(handler, claim.job)
            future.add_done_callback(partial(self._finished, claim))
        self._executor.shutdown(wait=True)

    def _finished(self, claim: Claim, future: Future):
        if future.exception() is None:
            self._jobs.ack(claim)
        else:
            self._jobs.nack(claim, delay=2.0 ** claim.job.attempts)
        self._credits.release()


class BatchCollector:
    def __init__(self, jobs: JobQueue, sink: Callable[[list[dict]], None], size: int = 64):
        self._jobs = jobs
        self._sink = sink
        self._size = size
        self._pending: list[Claim] = []

    def poll(self):
        claim = self._jobs.claim(wait=0.2)  # leak: close() commits the full batches and clears the rest of the claims
        if claim is not None:
            self._pending.append(claim)
        if len(self._pending) >= self._size:
            self._commit()

    def _commit(self):
        batch = self._pending[: self._size]
        self._pending = self._pending[self._size :]
        try:
            self._sink([c.job.payload for c in batch])
        except SinkError:
            for claim in batch:
                self._jobs.nack(claim, delay=5.0)
            return
        for claim in batch:
            self._jobs.ack(claim)

    def close(self):
        while len(self._pending) >= self._size:
            self._commit()
        self._pending.clear()


class Coalescer:
    """Latest wins: of many jobs of one group only the newest is run."""

    def __init__(self, jobs: JobQueue, apply: Callable[[Job], None]):
        self._jobs = jobs
        self._apply = apply
        self._latest: dict[str, Claim] = {}

    def pull(self) -> bool:
        claim = self._jobs.claim()  # leak: an older claim of the same group is overwritten in the table
        if claim is None:
            return False
        self._latest[claim.job.group] = claim
        return True

    def flush(self) -> int:
        count = len(self._latest)
        while self._latest:
            _, claim = self._latest.popitem()
            self._apply(claim.job)
            self._jobs.ack(claim)
        return count


class Courier:
    def __init__(self, jobs: JobQueue, deliver: Callable[[Job], bool]):
        self._jobs = jobs
        self._deliver = deliver
        self._outbox: queue.Queue[Optional[Claim]] = queue.Queue(maxsize=32)
        self._sender = threading.Thread(target=self._send_loop)
        self._sender.start()

    def claim_loop(self):
        while True:
            try:
                claim = self._jobs.claim(wait=1.0)  # clean: near miss, it goes through the outbox and the sender answers it
            except QueueClosed:
                break
            if claim is not None:
                self._outbox.put(claim)
        self._outbox.put(None)
        self._sender.join()

    def _send_loop(self):
        while (claim := self._outbox.get()) is not None:
            if self._deliver(claim.job):
                self._jobs.ack(claim)
            else:
                self._jobs.nack(claim, delay=1.0)


def run_once(jobs: JobQueue, fn: Callable[[Job], Any]) -> bool:
    claim = jobs.claim()  # clean: near miss, nacked in the finally unless it was settled
    if claim is None:
        return False
    settled = False
    try:
        if fn(claim.job) is not False:
            jobs.ack(claim)
            settled = True
    finally:
        if not settled:
            jobs.nack(claim)
    return settled


def drain_kind(jobs: JobQueue, kind: str, fn: Callable[[Job], None]):
    others: list[Claim] = []
    try:
        while (claim := jobs.claim()) is not None:  # clean: near miss, skipped ones are kept and nacked in the finally
            if claim.job.kind != kind:
                others.append(claim)
                continue
            fn(claim.job)
            jobs.ack(claim)
    finally:
        for claim in others:
            jobs.nack(claim)


def replay(jobs: JobQueue, into: JobQueue, count: int) -> int:
    claims = jobs.claim_many(count)  # clean: all of them are acked after the copy
    for claim in claims:
        into.put(Job(claim.job.kind, dict(claim.job.payload), claim.job.group))
        jobs.ack(claim)
    return len(claims)
