from __future__ import annotations

import queue
from typing import List, Optional


class WorkerDied(Exception):
    pass


class Worker:
    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.healthy = True

    def encode(self, text: str) -> List[int]:
        if not self.healthy:
            raise WorkerDied(self.ident)
        return [ord(c) for c in text]

    def decode(self, ids: List[int]) -> str:
        if not self.healthy:
            raise WorkerDied(self.ident)
        return "".join(map(chr, ids))


class WorkerPool:
    def __init__(self, n: int) -> None:
        self._idle: "queue.LifoQueue[Worker]" = queue.LifoQueue()
        for i in range(n):
            self._idle.put(Worker(i))

    def hire(self, timeout: Optional[float] = None) -> Optional[Worker]:
        try:
            return self._idle.get(timeout=timeout)
        except queue.Empty:
            return None

    def dismiss(self, worker: Worker) -> None:
        self._idle.put(worker)

    def qsize(self) -> int:
        return self._idle.qsize()
