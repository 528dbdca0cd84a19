"""Batch-inference work queue: workers lease items, ack, nack or extend them."""
from __future__ import annotations

import heapq
import itertools
import json
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Callable, Deque, Optional

log = logging.getLogger("batchq")


@dataclass(order=True)
class WorkItem:
    priority: int
    seq: int
    body: bytes = field(compare=False)
    attempts: int = field(default=0, compare=False)


@dataclass
class Lease:
    item: WorkItem
    worker: str
    deadline: float


class WorkQueue:
    def __init__(self) -> None:
        self._heap: list[WorkItem] = []
        self._seq = itertools.count()
        self.dead: Deque[WorkItem] = deque(maxlen=1000)

    def enqueue(self, body: bytes, priority: int = 0) -> None:
        heapq.heappush(self._heap, WorkItem(priority, next(self._seq), body))

    def lease(self, worker: str, ttl: float = 60.0) -> Optional[Lease]:
        if not self._heap:
            return None
        item = heapq.heappop(self._heap)  # clean: wrapped in the lease given to the worker
        item.attempts += 1
        return Lease(item, worker, time.monotonic() + ttl)

    def lease_batch(self, worker: str, count: int, ttl: float = 60.0) -> list[Lease]:
        batch: list[Lease] = []
        while self._heap and len(batch) < count:
            item = heapq.heappop(self._heap)  # clean: near miss, worn-out items go to the dead letters by design
            if item.attempts >= 5:
                self.dead.append(item)
                continue
            item.attempts += 1
            batch.append(Lease(item, worker, time.monotonic() + ttl))
        return batch

    def ack(self, lease: Lease) -> None:
        log.debug("%s done by %s", lease.item.seq, lease.worker)

    def nack(self, lease: Lease) -> None:
        if lease.item.attempts >= 5:
            self.dead.append(lease.item)
        else:
            heapq.heappush(self._heap, lease.item)


class BatchWorker:
    def __init__(self, name: str, q: WorkQueue, infer: Callable[[dict[str, Any]], Optional[str]]) -> None:
        self.name = name
        self.q = q
        self.infer = infer
        self.results: dict[int, str] = {}
        self.inflight: dict[int, Lease] = {}
        self.current: Optional[Lease] = None

    def run_once(self) -> bool:
        lease = self.q.lease(self.name)  # leak: undecodable bodies are logged and the lease neither acked nor nacked
        if lease is None:
            return False
        try:
            body = json.loads(lease.item.body)
        except json.JSONDecodeError:
            log.error("item %d is not JSON", lease.item.seq)
            return True
        text = self.infer(body)
        if text is None:
            self.q.nack(lease)
            return True
        self.results[lease.item.seq] = text
        self.q.ack(lease)
        return True

    def run_until(self, deadline: float) -> int:
        handled = 0
        while time.monotonic() < deadline:
            lease = self.q.lease(self.name)  # clean: near miss, failing ones are nacked before the continue
            if lease is None:
                break
            try:
                text = self.infer(json.loads(lease.item.body))
            except (json.JSONDecodeError, TimeoutError):
                self.q.nack(lease)
                continue
            if text is not None:
                self.results[lease.item.seq] = text
            self.q.ack(lease)
            handled += 1
        return handled

    def run_batch(self, size: int) -> int:
        leases = self.q.lease_batch(self.name, size)  # leak: breaking at the first empty answer forgets the remaining leases
        done = 0
        for lease in leases:
            text = self.infer(json.loads(lease.item.body))
            if text is None:
                self.q.nack(lease)
                break
            self.results[lease.item.seq] = text
            self.q.ack(lease)
            done += 1
        return done

    def run_batch_all(self, size: int) -> int:
        leases = deque(self.q.lease_batch(self.name, size))  # clean: near miss, those after the break are nacked
        done = 0
        while leases:
            lease = leases.popleft()
            text = self.infer(json.loads(lease.item.body))
            if text is None:
                self.q.nack(lease)
                break
            self.results[lease.item.seq] = text
            self.q.ack(lease)
            done += 1
        for rest in leases:
            self.q.nack(rest)
        return done

    def begin(self) -> Optional[int]:
        lease = self.q.lease(self.name, ttl=600.0)  # clean: in inflight until complete or abandon_all
        if lease is None:
            return None
        self.inflight[lease.item.seq] = lease
        return lease.item.seq

    def complete(self, seq: int, text: str) -> None:
        self.q.ack(self.inflight.pop(seq))
        self.results[seq] = text

    def abandon_all(self) -> None:
        for lease in self.inflight.values():
            self.q.nack(lease)
        self.inflight.clear()

    def advance(self) -> bool:
        """Step through the queue, one item in the cursor."""
        if self.current is not None:
            self.q.ack(self.current)
        self.current = self.q.lease(self.name)  # clean: near miss, the previous one was acked just above
        return self.current is not None

    def skip(self) -> bool:
        self.current = self.q.lease(self.name)  # leak: whatever was in the cursor is overwritten
        return self.current is not None

    def close(self) -> None:
        if self.current is not None:
            self.q.nack(self.current)
            self.current = None


def pending_preview(q: WorkQueue, count: int) -> list[bytes]:
    return [lease.item.body[:80] for lease in q.lease_batch("preview", count)]  # leak: only the bodies are kept


def drain_to_file(q: WorkQueue, path: str) -> int:
    n = 0
    with open(path, "wb") as out:  # clean: with statement
        while (lease := q.lease("drain")) is not None:  # leak: empty bodies are skipped without ack or nack
            if not lease.item.body:
                continue
            out.write(lease.item.body + b"\n")
            q.ack(lease)
            n += 1
    return n
