"""Starts, watches and restarts the workers of one host."""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

from .rendezvous import Rendezvous
from .slots import Grant, SlotLedger

log = logging.getLogger(__name__)

Entry = Callable[[int], int]


class WorkerFailed(RuntimeError):
    pass


@dataclass
class Worker:
    name: str
    grant: Optional[Grant]
    restarts: int = 0
    exit_code: Optional[int] = None


class ElasticAgent:
    def __init__(self, ledger: SlotLedger, rdzv: Rendezvous, max_restarts: int = 2, parallel_starts: int = 2) -> None:
        self.ledger = ledger
        self.rdzv = rdzv
        self.max_restarts = max_restarts
        self.workers: Dict[str, Worker] = {}
        self._start_permits = threading.Semaphore(parallel_starts)

    def spawn(self, name: str) -> Optional[Worker]:
        if name in self.workers:
            return None
        grant = self.ledger.claim(name)  # clean: moves into the worker, which reap() surrenders
        if grant is None:
            return None
        worker = Worker(name, grant)
        self.workers[name] = worker
        return worker

    def spawn_group(self, names: List[str]) -> bool:
        if any(name in self.workers for name in names):
            return False
        grants = self.ledger.claim_many("group", len(names))  # leak: a short group is refused and its grants are forgotten
        if len(grants) < len(names):
            log.warning("group of %d does not fit", len(names))
            return False
        for name, grant in zip(names, grants):
            self.workers[name] = Worker(name, grant)
        return True

    def spawn_group_atomic(self, names: List[str]) -> bool:
        if any(name in self.workers for name in names):
            return False
        grants = self.ledger.claim_many("group", len(names))  # clean: near miss, a short group is surrendered grant by grant
        if len(grants) < len(names):
            for grant in grants:
                self.ledger.surrender(grant)
            return False
        self.workers.update((n, Worker(n, g)) for n, g in zip(names, grants))
        return True

    def reap(self) -> List[str]:
        gone = [w for w in self.workers.values() if w.exit_code is not None]
        for worker in gone:
            del self.workers[worker.name]
            if worker.grant is not None:
                self.ledger.surrender(worker.grant)
                worker.grant = None
        return [w.name for w in gone]

    def restart(self, worker: Worker) -> bool:
        """Put a worker on another slot; the old slot may be unhealthy."""
        old = worker.grant
        worker.grant = self.ledger.claim(worker.name)  # clean: near miss, the previous grant was saved and is surrendered
        worker.restarts += 1
        if old is not None:
            self.ledger.surrender(old)
        return worker.grant is not None

    def run_with_retries(self, name: str, entry: Entry) -> int:
        for attempt in range(self.max_restarts + 1):
            grant = self.ledger.claim_blocking(name, time.monotonic() + 1.0)  # leak: a failed attempt claims again without a surrender
            try:
                code = entry(grant.slot)
            except WorkerFailed:
                log.warning("%s: attempt %d failed", name, attempt)
                continue
            self.ledger.surrender(grant)
            return code
        return -1

    def run_sticky(self, name: str, entry: Entry) -> int:
        """Retries on the same slot."""
        grant: Optional[Grant] = None
        code = -1
        for attempt in range(self.max_restarts + 1):
            if grant is None:
                grant = self.ledger.claim(name)  # clean: near miss, claimed once, kept over the retries, surrendered after the loop
                if grant is None:
                    continue
            try:
                code = entry(grant.slot)
                break
            except WorkerFailed:
                log.warning("%s: attempt %d failed", name, attempt)
        if grant is not None:
            self.ledger.surrender(grant)
        return code

    def start_throttled(self, name: str, entry: Entry) -> bool:
        self._start_permits.acquire()  # leak: the permit is kept when no slot is free
        worker = self.spawn(name)  # clean: registered with the agent
        if worker is None:
            return False
        worker.exit_code = entry(worker.grant.slot if worker.grant else -1)
        self._start_permits.release()
        return True

    def health_check(self, names: List[str], probe: Entry) -> Dict[str, int]:
        codes: Dict[str, int] = {}
        for name in names:
            self._start_permits.acquire()  # clean: near miss, each of the ways through the turn releases it
            if name not in self.workers:
                self._start_permits.release()
                continue
            try:
                codes[name] = probe(self.workers[name].restarts)
            except WorkerFailed:
                codes[name] = -1
            self._start_permits.release()
        return codes

    def evict(self, name: str) -> bool:
        worker = self.workers.pop(name, None)
        if worker is None:
            return False
        if worker.grant is not None:
            self.ledger.surrender(worker.grant)
        return True
