"""Tokenizer workers shared by front-end threads, and their text arenas."""
from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Tuple

logger = logging.getLogger(__name__)


class Worker:
    def __init__(self, number: int, vocab: Dict[str, int]) -> None:
        self.number = number
        self.vocab = vocab
        self.calls = 0

    def encode(self, text: str) -> List[int]:
        self.calls += 1
        return [self.vocab.get(piece, 0) for piece in text.split()]

    def decode(self, ids: List[int]) -> str:
        self.calls += 1
        names = {v: k for k, v in self.vocab.items()}
        return " ".join(names.get(i, "<unk>") for i in ids)


class WorkerPool:
    def __init__(self, size: int, vocab: Dict[str, int], max_calls: int) -> None:
        self.vocab = vocab
        self.max_calls = max_calls
        self._ready = [Worker(i, vocab) for i in range(size)]
        self._permits = threading.BoundedSemaphore(size)
        self._mu = threading.Lock()

    def hire(self, timeout: Optional[float] = None) -> Optional[Worker]:
        if not self._permits.acquire(timeout=timeout):  # clean: goes with the worker, fire() releases
            return None
        with self._mu:
            return self._ready.pop()

    def fire(self, worker: Worker) -> None:
        if worker.calls >= self.max_calls:
            worker = Worker(worker.number, self.vocab)
        with self._mu:
            self._ready.append(worker)
        self._permits.release()

    def hire_fresh(self, timeout: float) -> Optional[Worker]:
        """A worker with fewer calls than half of the limit."""
        worker = self.hire(timeout)  # leak: a worn worker is neither returned nor fired
        if worker is not None and worker.calls * 2 < self.max_calls:
            return worker
        return None

    @contextmanager
    def hired(self, timeout: Optional[float] = None) -> Iterator[Worker]:
        worker = self.hire(timeout)  # clean: near miss, without a worker it raises before anything is held
        if worker is None:
            raise TimeoutError("no tokenizer worker")
        try:
            yield worker
        finally:
            self.fire(worker)

    @contextmanager
    def hired_if(self, wanted: bool) -> Iterator[Optional[Worker]]:
        worker = self.hire() if wanted else None  # clean: near miss, fired under the same condition
        try:
            yield worker
        finally:
            if wanted and worker is not None:
                self.fire(worker)


@dataclass
class EncodeJob:
    rid: str
    text: str
    worker: Optional[Worker] = None
    ids: Optional[List[int]] = None
    owns_worker: bool = field(default=False, init=False)


class FrontEnd:
    def __init__(self, pool: WorkerPool, threads: int) -> None:
        self.pool = pool
        self.exec = ThreadPoolExecutor(threads)
        self.jobs: Dict[str, EncodeJob] = {}
        self.dedicated: Dict[str, Worker] = {}
        self.stop = threading.Event()

    def encode(self, text: str) -> List[int]:
        with self.pool.hired() as worker:  # clean: the context manager fires
            return worker.encode(text)

    def encode_chat(self, turns: List[Tuple[str, str]], template: bool) -> List[int]:
        with self.pool.hired_if(template) as worker:  # clean: the context manager fires
            if worker is None:
                return [len(text) for _, text in turns]
            return [i for role, text in turns for i in worker.encode(f"{role} {text}")]

    def count(self, text: str, limit: int) -> int:
        worker = self.pool.hire(0.5)  # leak: texts over the limit return before fire()
        if worker is None:
            return len(text) // 4
        ids = worker.encode(text)
        if len(ids) > limit:
            logger.info("prompt of %d tokens over %d", len(ids), limit)
            return -1
        self.pool.fire(worker)
        return len(ids)

    def encode_either(self, text: str, worker: Optional[Worker] = None) -> List[int]:
        """Uses the given worker, or hires one for this call."""
        owned = worker is None
        if worker is None:
            worker = self.pool.hire()  # clean: near miss, fired under the owned flag
            if worker is None:
                return []
        ids = worker.encode(text)
        if owned:
            self.pool.fire(worker)
        return ids

    # -- jobs whose ownership is kept in a flag ------------------------

    def start(self, job: EncodeJob) -> bool:
        job.worker = self.pool.hire(1.0)  # leak: owns_worker is never set, so finish() never fires it
        if job.worker is None:
            return False
        self.jobs[job.rid] = job
        job.ids = job.worker.encode(job.text)
        return True

    def start_with(self, job: EncodeJob, worker: Worker) -> None:
        job.worker = worker
        self.jobs[job.rid] = job
        job.ids = worker.encode(job.text)

    def finish(self, rid: str) -> List[int]:
        job = self.jobs.pop(rid)
        if job.owns_worker and job.worker is not None:
            self.pool.fire(job.worker)
        job.worker = None
        return job.ids or []

    # -- futures -------------------------------------------------------

    def encode_async(self, text: str) -> "Future[List[int]]":
        worker = self.pool.hire()  # clean: near miss, fired by the future's callback
        assert worker is not None
        future = self.exec.submit(worker.encode, text)
        future.add_done_callback(lambda _: self.pool.fire(worker))
        return future

    def encode_batch(self, texts: List[str], timeout: float) -> List[List[int]]:
        """As many texts as there are workers in time, the others empty."""
        running: List[Tuple[Worker, "Future[List[int]]"]] = []
        out: List[List[int]] = []
        for text in texts:
            worker = self.pool.hire(timeout)  # leak: workers whose result is empty are not fired
            if worker is None:
                break
            running.append((worker, self.exec.submit(worker.encode, text)))
        for worker, future in running:
            ids = future.result()
            out.append(ids)
            if not ids:
                continue
            self.pool.fire(worker)
        return out + [[] for _ in range(len(texts) - len(out))]

    # -- dedicated workers ---------------------------------------------

    def dedicate(self, tenant: str) -> Optional[Worker]:
        return self.dedicated.setdefault(tenant, self.pool.hire(0.1))  # leak: lost for a known tenant

    def release_tenant(self, tenant: str) -> None:
        worker = self.dedicated.pop(tenant, None)
        if worker is not None:
            self.pool.fire(worker)

    def decode_loop(self, batches: "List[List[int]]") -> List[str]:
        """Runs until stopped; one worker for the whole loop."""
        texts: List[str] = []
        worker = self.pool.hire()  # leak: the stop event returns out of the loop with the worker
        if worker is None:
            return texts
        for ids in batches:
            if self.stop.is_set():
                return texts
            texts.append(worker.decode(ids))
        self.pool.fire(worker)
        return texts

    def decode_stream(self, batches: List[List[int]]) -> Iterator[str]:
        for ids in batches:
            with self.pool.hired(2.0) as worker:  # clean: fired each round before the yield
                text = worker.decode(ids)
            yield text
