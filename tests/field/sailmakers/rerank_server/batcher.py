import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, List, Optional

from .pool import PaddedPool, RowLease

log = logging.getLogger(__name__)


@dataclass
class Job:
    jid: str
    rows: List[RowLease] = field(default_factory=list)
    scores: Optional[List[float]] = None
    error: Optional[str] = None

    def end(self) -> None:
        while self.rows:
            self.rows.pop().end()


class MicroBatcher:
    def __init__(self, pool: PaddedPool, vocab: int, max_rows: int, max_jobs: int):
        self.pool, self.vocab = pool, vocab
        self.max_rows = max_rows
        self.jobs: Deque[Job] = deque()
        self._space = threading.Semaphore(max_jobs)

    def submit(self, jid: str, pairs: List[List[int]]) -> Optional[Job]:
        if not self._space.acquire(blocking=False):  # clean: near miss, released on refusal and by next_batch()
            return None
        job = Job(jid)
        for toks in pairs:
            row = self.pool.lease_filled(toks, self.vocab)  # clean: in job.rows, ended on refusal and by the runner
            if row is None:
                job.end()
                self._space.release()
                return None
            job.rows.append(row)
        self.jobs.append(job)
        return job

    def submit_query(self, jid: str, query: List[int], docs: List[List[int]]) -> Optional[Job]:
        q = self.pool.lease_filled(query, self.vocab)  # leak: not ended when the queue has no space
        if q is None:
            return None
        if not self._space.acquire(timeout=0.1):  # clean: released by next_batch()
            return None
        job = Job(jid, [q])
        for d in docs:
            row = self.pool.lease_filled(d, self.vocab)  # clean: near miss, skipped only when None, else in job.rows
            if row is None:
                log.info("%s: document skipped", jid)
                continue
            job.rows.append(row)
        self.jobs.append(job)
        return job

    def next_batch(self) -> List[Job]:
        out, rows = [], 0
        while self.jobs and rows + len(self.jobs[0].rows) <= self.max_rows:
            job = self.jobs.popleft()
            self._space.release()
            rows += len(job.rows)
            out.append(job)
        return out
