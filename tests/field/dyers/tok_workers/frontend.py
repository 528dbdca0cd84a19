from __future__ import annotations

from typing import Any, Dict, List, Optional

from .lease import Sticky, WorkerLease, hire_healthy, lease
from .pool import Worker, WorkerDied, WorkerPool


class FrontEnd:
    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.sticky = Sticky(pool)
        self.batch: List[WorkerLease] = []
        self.jobs: Dict[str, WorkerLease] = {}

    def encode(self, text: str) -> List[int]:
        held = lease(self.pool)  # clean: the with ends it
        if held is None:
            return []
        with held as worker:
            return worker.encode(text)

    def count_tokens(self, text: str) -> int:
        held = lease(self.pool)  # leak: WorkerDied is caught, -1 is answered and the lease is not ended
        if held is None:
            return -1
        try:
            n = len(held.worker.encode(text))
        except WorkerDied:
            return -1
        held.end()
        return n

    def roundtrip(self, text: str) -> Optional[bool]:
        enc = lease(self.pool)  # leak: no second worker, returns without ending the first
        if enc is None:
            return None
        dec = lease(self.pool)  # clean: ended at the end
        if dec is None:
            return None
        same = dec.worker.decode(enc.worker.encode(text)) == text
        dec.end()
        enc.end()
        return same

    def truncate(self, text: str, limit: int) -> str:
        worker = hire_healthy(self.pool, 3)  # clean: near miss, dismissed in the finally on both returns
        if worker is None:
            return text[:limit]
        try:
            ids = worker.encode(text)
            if len(ids) <= limit:
                return text
            return worker.decode(ids[:limit])
        finally:
            self.pool.dismiss(worker)

    def widen(self, n: int) -> int:
        """Hold up to n workers for a batch job; `narrow` ends them."""
        while len(self.batch) < n:
            held = lease(self.pool)  # clean: near miss, break only with None, the others sit on self.batch
            if held is None:
                break
            self.batch.append(held)
        return len(self.batch)

    def narrow(self) -> None:
        while self.batch:
            self.batch.pop().end()

    def start_job(self, job: str) -> bool:
        held = lease(self.pool)  # leak: a refused job name returns with the lease
        if held is None or job in self.jobs:
            return False
        self.jobs[job] = held
        return True

    def end_job(self, job: str) -> None:
        held = self.jobs.pop(job, None)
        if held is not None:
            held.end()

    def purge_jobs(self) -> int:
        n = len(self.jobs)
        for held in self.jobs.values():
            held.end()
        self.jobs = {}
        return n
