"""Workers, their load counters and their keep-alive connections."""
from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass


@dataclass(eq=False)
class Worker:
    url: str
    capacity: int
    load: int = 0
    healthy: bool = True
    draining: bool = False


class WorkerRegistry:
    """All workers; a request occupies one load unit of its worker."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self._lock = threading.Lock()

    def occupy(self, worker: Worker) -> bool:
        with self._lock:  # clean: scoped
            if not worker.healthy or worker.load >= worker.capacity:
                return False
            worker.load += 1  # clean: near miss, only the True path takes a unit, the caller owns it
            return True

    def vacate(self, worker: Worker) -> None:
        with self._lock:  # clean: scoped
            worker.load -= 1


class Connection:
    """A keep-alive HTTP connection to one worker."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.broken = False

    def request(self, body: dict) -> dict:
        raise NotImplementedError

    def close(self) -> None:
        self.broken = True


class ConnectionPool:
    """Idle connections in one bucket per worker url, bounded overall."""

    def __init__(self, max_open: int) -> None:
        self._buckets: defaultdict[str, list[Connection]] = defaultdict(list)
        self._open = threading.BoundedSemaphore(max_open)

    def get_conn(self, url: str) -> Connection:
        bucket = self._buckets[url]
        self._open.acquire()  # clean: near miss, the permit travels with the connection, put_conn() releases it
        if bucket:
            return bucket.pop()  # clean: to the caller
        return Connection(url)

    def put_conn(self, conn: Connection) -> None:
        if not conn.broken:
            self._buckets[conn.url].append(conn)
        self._open.release()
