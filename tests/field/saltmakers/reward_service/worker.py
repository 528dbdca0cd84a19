"""Takes jobs from a queue, keeps recently used scorers open and runs the rest on an executor."""
from __future__ import annotations

import collections
import logging
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

from .devices import FairBook, Lease
from .scorers import Scorer

logger = logging.getLogger(__name__)


@dataclass
class Job:
    job_id: str
    model: str
    mb: int
    pairs: List[tuple] = field(default_factory=list)
    lease: Optional[Lease] = None


class Worker:
    def __init__(self, book: FairBook, load, pool: Executor, max_open: int = 4):
        self.book = book
        self.load = load
        self.pool = pool
        self.max_open = max_open
        self.open_scorers: "collections.OrderedDict[str, Scorer]" = collections.OrderedDict()
        self.jobs: Dict[str, Job] = {}

    def scorer(self, name: str, mb: int) -> Optional[Scorer]:
        """The cache owns what this returns."""
        if name in self.open_scorers:
            self.open_scorers.move_to_end(name)
            return self.open_scorers[name]
        s = Scorer(name, mb, self.load, self.book)
        if not s.open():  # clean: near miss, in open_scorers until it is evicted and closed
            return None
        self.open_scorers[name] = s
        while len(self.open_scorers) > self.max_open:
            _, old = self.open_scorers.popitem(last=False)
            old.close()
        return s

    def submit(self, job: Job) -> bool:
        job.lease = self.book.sign_out(job.mb, job.model)  # clean: near miss, the job's done callback signs it in
        if job.lease is None:
            return False
        self.jobs[job.job_id] = job
        fut = self.pool.submit(self._run, job, job.lease.device)
        fut.add_done_callback(lambda f: self._finished(job, f))
        return True

    def _run(self, job: Job, device: int) -> List[float]:
        model = self.load(job.model, device)
        return [float(model(p, a)) for p, a in job.pairs]

    def _finished(self, job: Job, fut: Future) -> None:
        self.jobs.pop(job.job_id, None)
        self.book.sign_in(job.lease)
        job.lease = None
        if fut.exception() is not None:
            logger.warning("job %s: %s", job.job_id, fut.exception())

    def submit_notify(self, job: Job, notify: Callable[[List[float]], None]) -> bool:
        lease = self.book.sign_out(job.mb, job.model)  # leak: a failed job leaves the callback before the sign-in
        if lease is None:
            return False
        fut = self.pool.submit(self._run, job, lease.device)

        def after(f: Future) -> None:
            if f.exception() is not None:
                logger.warning("job %s: %s", job.job_id, f.exception())
                return
            notify(f.result())
            self.book.sign_in(lease)

        fut.add_done_callback(after)
        return True

    def shutdown(self) -> None:
        while self.open_scorers:
            self.open_scorers.popitem()[1].close()
        self.pool.shutdown()
