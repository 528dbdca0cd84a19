"""Chunked prefill under a token budget shared by worker threads."""
from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterator, List, Optional, Sequence


class BudgetExceeded(RuntimeError):
    pass


class TokenBudget:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._cv = threading.Condition()

    def try_debit(self, n: int) -> bool:
        with self._cv:
            if self.used + n > self.limit:
                return False
            self.used += n
            return True

    def debit(self, n: int, timeout: float = 5.0) -> None:
        with self._cv:
            if not self._cv.wait_for(lambda: self.used + n <= self.limit, timeout):
                raise BudgetExceeded(f"{n} tokens over {self.limit}")
            self.used += n

    def credit(self, n: int) -> None:
        with self._cv:
            self.used -= n
            self._cv.notify_all()

    @contextmanager
    def hold(self, n: int) -> Iterator[None]:
        self.debit(n)  # clean: credited in finally
        try:
            yield
        finally:
            self.credit(n)


@dataclass
class PrefillJob:
    jid: int
    tokens: List[int]
    cancelled: bool = False
    debited: int = 0
    done: List[int] = field(default_factory=list)


class ChunkedPrefill:
    def __init__(self, budget: TokenBudget, chunk: int, workers: int = 2) -> None:
        self.budget = budget
        self.chunk = chunk
        self._exec = ThreadPoolExecutor(workers)
        self._window = threading.Semaphore(workers)
        self.results: Dict[int, int] = {}

    def _attend(self, tokens: Sequence[int]) -> int:
        if any(t < 0 for t in tokens):
            raise ValueError("negative token id")
        return sum(tokens)

    def run(self, job: PrefillJob) -> bool:
        n = len(job.tokens)
        if not self.budget.try_debit(n):  # leak: a cancelled job returns without the credit
            return False
        if job.cancelled:
            return False
        job.done.append(self._attend(job.tokens))
        self.budget.credit(n)
        return True

    def run_chunks(self, job: PrefillJob) -> int:
        total = 0
        for i in range(0, len(job.tokens), self.chunk):
            part = job.tokens[i:i + self.chunk]
            self.budget.debit(len(part))  # leak: a chunk that fails is skipped without the credit
            try:
                total += self._attend(part)
            except ValueError:
                job.cancelled = True
                continue
            self.budget.credit(len(part))
        return total

    def run_chunks_scoped(self, job: PrefillJob) -> int:
        total = 0
        for i in range(0, len(job.tokens), self.chunk):
            part = job.tokens[i:i + self.chunk]
            try:
                with self.budget.hold(len(part)):  # clean: near miss, the exception leaves through the with block
                    total += self._attend(part)
            except ValueError:
                continue
        return total

    def reserve_all(self, jobs: Sequence[PrefillJob]) -> bool:
        for i, job in enumerate(jobs):
            if not self.budget.try_debit(len(job.tokens)):  # clean: near miss, a refusal credits the jobs before it
                for earlier in jobs[:i]:
                    self.budget.credit(earlier.debited)
                    earlier.debited = 0
                return False
            job.debited = len(job.tokens)
        return True

    def reserve_prompt_and_output(self, job: PrefillJob, max_new: int) -> bool:
        n = len(job.tokens)
        if not self.budget.try_debit(n):  # leak: not credited when the output does not fit
            return False
        if not self.budget.try_debit(max_new):  # clean: refusal tested, otherwise recorded in the job
            return False
        job.debited = n + max_new
        return True

    def settle(self, job: PrefillJob) -> None:
        if job.debited:
            self.budget.credit(job.debited)
            job.debited = 0

    def submit(self, job: PrefillJob) -> "Optional[Future[int]]":
        n = len(job.tokens)
        if not self.budget.try_debit(n):  # clean: near miss, the worker credits in finally
            return None

        def work() -> int:
            try:
                return self._attend(job.tokens)
            finally:
                self.budget.credit(n)

        return self._exec.submit(work)

    def submit_windowed(self, job: PrefillJob) -> "Future[int]":
        self._window.acquire()  # clean: near miss, the done callback releases it
        fut = self._exec.submit(self._attend, job.tokens)
        fut.add_done_callback(lambda _f: self._window.release())
        return fut

    def submit_recorded(self, job: PrefillJob) -> "Future[int]":
        self._window.acquire()  # leak: the callback releases only when the job has a result
        fut = self._exec.submit(self._attend, job.tokens)

        def record(f: "Future[int]") -> None:
            if f.exception() is None:
                self.results[job.jid] = f.result()
                self._window.release()

        fut.add_done_callback(record)
        return fut

    def run_with_retry(self, job: PrefillJob, attempts: int = 3) -> Optional[int]:
        n = len(job.tokens)
        for attempt in range(attempts):
            if not self.budget.try_debit(n):  # clean: near miss, retried only when refused, credited in finally
                time.sleep(0.001 * attempt)
                continue
            try:
                return self._attend(job.tokens)
            finally:
                self.budget.credit(n)
        return None

    def run_retry_window(self, job: PrefillJob, attempts: int = 3) -> Optional[int]:
        for _ in range(attempts):
            if not self._window.acquire(timeout=0.01):  # leak: a busy budget retries with one more window permit
                continue
            if not self.budget.try_debit(len(job.tokens)):  # clean: refusal tested, credited below
                continue
            out = self._attend(job.tokens)
            self.budget.credit(len(job.tokens))
            self._window.release()
            return out
        return None

    def close(self) -> None:
        self._exec.shutdown(wait=True)


class BudgetLease:
    """One debit as an object."""

    def __init__(self, budget: TokenBudget, n: int) -> None:
        self.budget = budget
        self.n = n

    def __enter__(self) -> "BudgetLease":
        self.budget.debit(self.n)  # clean: near miss, __exit__ credits before it decides what to swallow
        return self

    def shrink(self, n: int) -> None:
        self.budget.credit(self.n - n)
        self.n = n

    def __exit__(self, exc_type, exc, tb) -> bool:
        self.budget.credit(self.n)
        return exc_type is not None and issubclass(exc_type, ValueError)


def rescore(prefill: ChunkedPrefill, job: PrefillJob) -> Optional[int]:
    with BudgetLease(prefill.budget, len(job.tokens)) as lease:  # clean: with block
        lease.shrink(len(job.tokens) // 2)
        return prefill._attend(job.tokens[: lease.n])
    return None


def interleave(prefill: ChunkedPrefill, jobs: Sequence[PrefillJob], on_chunk: Callable[[int], bool]) -> int:
    served = 0
    for job in jobs:
        prefill.budget.debit(prefill.chunk)  # leak: a refused chunk breaks out before the credit
        if not on_chunk(job.jid):
            break
        served += 1
        prefill.budget.credit(prefill.chunk)
    return served


if __name__ == "__main__":
    tb = TokenBudget(64)
    cp = ChunkedPrefill(tb, 4)
    jb = PrefillJob(1, list(range(10)))
    print(cp.run(jb), cp.run_chunks(jb), cp.run_chunks_scoped(jb), cp.run_with_retry(jb), cp.run_retry_window(jb))
    f1 = cp.submit(jb)
    print(f1.result() if f1 else None, cp.submit_windowed(jb).result(), cp.submit_recorded(jb).result())
    print(rescore(cp, jb), interleave(cp, [jb], lambda _j: True))
    cp.close()
    print(tb.used)
