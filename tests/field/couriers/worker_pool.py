"""Pool of long lived tokenizer worker processes."""
from __future__ import annotations

import logging
import queue
import subprocess
import threading
from dataclasses import dataclass
from typing import Sequence

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Worker:
    ident: int
    proc: subprocess.Popen
    served: int = 0

    def call(self, line: str) -> str | None:
        if self.proc.poll() is not None:
            return None
        self.proc.stdin.write(line + "\n")
        self.proc.stdin.flush()
        self.served += 1
        return self.proc.stdout.readline().rstrip("\n")


class WorkerPool:
    def __init__(self, argv: Sequence[str], size: int, max_served: int = 10_000) -> None:
        self.argv = list(argv)
        self.max_served = max_served
        self._queue: queue.Queue[Worker] = queue.Queue()
        self._mutex = threading.Lock()
        self._count = 0
        for _ in range(size):
            self._queue.put(self._spawn())  # clean: owned by the queue

    def _spawn(self) -> Worker:
        self._count += 1
        proc = subprocess.Popen(self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # clean: owned by the worker, killed by shutdown or replace
        return Worker(self._count, proc)

    def borrow(self, timeout: float | None = None) -> Worker | None:
        try:
            return self._queue.get(timeout=timeout)  # clean: handed to the caller
        except queue.Empty:
            return None

    def give_back(self, worker: Worker) -> None:
        if worker.served >= self.max_served or worker.proc.poll() is not None:
            self.replace(worker)
            return
        self._queue.put(worker)

    def replace(self, worker: Worker) -> None:
        worker.proc.kill()
        worker.proc.wait()
        with self._mutex:  # clean: with block
            self._queue.put(self._spawn())  # clean: takes the killed worker's place in the queue

    def shutdown(self) -> None:
        while not self._queue.empty():
            worker = self._queue.get_nowait()  # clean: taken out for good, its process is ended
            worker.proc.terminate()
            worker.proc.wait()


class Tokenizer:
    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.sticky: dict[str, Worker] = {}

    def encode(self, text: str) -> list[int]:
        worker = self.pool.borrow()  # clean: given back in finally
        try:
            reply = worker.call(text)
        finally:
            self.pool.give_back(worker)
        return [int(t) for t in reply.split()] if reply else []

    def encode_retry(self, text: str, attempts: int = 3) -> list[int]:
        for attempt in range(attempts):
            worker = self.pool.borrow(timeout=2.0)  # leak: a worker that answered nothing is left behind by the next attempt
            if worker is None:
                continue
            reply = worker.call(text)
            if reply is None:
                logger.warning("worker %d did not answer (attempt %d)", worker.ident, attempt)
                continue
            self.pool.give_back(worker)
            return [int(t) for t in reply.split()]
        return []

    def encode_retry_fresh(self, text: str, attempts: int = 3) -> list[int]:
        for _ in range(attempts):
            worker = self.pool.borrow(timeout=2.0)  # clean: near miss, a silent worker is replaced and so accounted for
            if worker is None:
                continue
            reply = worker.call(text)
            if reply is None:
                self.pool.replace(worker)
                continue
            self.pool.give_back(worker)
            return [int(t) for t in reply.split()]
        return []

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        out: list[list[int]] = []
        worker = self.pool.borrow()  # clean: near miss, break and normal end meet at the give_back
        for text in texts:
            reply = worker.call(text)
            if reply is None:
                break
            out.append([int(t) for t in reply.split()])
        self.pool.give_back(worker)
        return out

    def attach(self, session: str) -> Worker:
        worker = self.sticky.get(session)
        if worker is None:
            worker = self.pool.borrow()  # clean: stored in sticky, detach gives it back
            self.sticky[session] = worker
        return worker

    def detach(self, session: str) -> None:
        worker = self.sticky.pop(session, None)
        if worker is not None:
            self.pool.give_back(worker)

    def swap_worker(self, session: str) -> None:
        """Used after a vocabulary update; the session continues on another worker."""
        if session in self.sticky:
            self.sticky[session] = self.pool.borrow()  # leak: the session's former worker is overwritten

    def ping(self) -> bool:
        return self.pool.borrow().call("ping") == "pong"  # leak: the borrowed worker is dropped after the call

    def vocab_size(self) -> int:
        worker = self.pool.borrow(timeout=1.0)  # leak: the unparsable answer returns -1 without give_back
        if worker is None:
            return -1
        reply = worker.call("vocab")
        try:
            size = int(reply)
        except (TypeError, ValueError):
            return -1
        self.pool.give_back(worker)
        return size
