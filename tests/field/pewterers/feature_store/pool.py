"""Connections to the online feature store."""
from __future__ import annotations

import queue
import threading
from typing import Any, Dict, List, Optional


class StoreUnavailable(Exception):
    pass


class Connection:
    def __init__(self, backend: Dict[str, Any]) -> None:
        self._backend = backend
        self.broken = False

    def get(self, key: str) -> Any:
        if self.broken:
            raise StoreUnavailable(key)
        return self._backend.get(key)

    def put(self, key: str, value: Any) -> None:
        if self.broken:
            raise StoreUnavailable(key)
        self._backend[key] = value

    def ping(self) -> bool:
        return not self.broken


class ConnectionPool:
    def __init__(self, backend: Dict[str, Any], size: int, max_waiters: int = 8) -> None:
        self._idle: "queue.LifoQueue[Connection]" = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(Connection(backend))
        self._waiters = threading.BoundedSemaphore(max_waiters)
        self._quota = threading.BoundedSemaphore(size)
        self._backend = backend

    def get_conn(self, timeout: float = 0.05) -> Optional[Connection]:
        if not self._waiters.acquire(blocking=False):  # clean: released in finally
            return None
        try:
            return self._idle.get(timeout=timeout)
        except queue.Empty:
            return None
        finally:
            self._waiters.release()

    def put_conn(self, conn: Connection) -> None:
        if conn.broken:
            conn = Connection(self._backend)
        self._idle.put(conn)

    def get_many(self, n: int) -> List[Connection]:
        """Between zero and n connections; the caller returns what it got."""
        out: List[Connection] = []
        while len(out) < n:
            conn = self.get_conn(timeout=0.001)  # clean: returned in the list
            if conn is None:
                break
            out.append(conn)
        return out

    def run_in_quota(self, fn, *args):
        if not self._quota.acquire(timeout=0.05):  # leak: return None without a connection keeps the quota permit
            return None
        conn = self.get_conn()  # clean: put back in finally
        if conn is None:
            return None
        try:
            return fn(conn, *args)
        finally:
            self.put_conn(conn)
            self._quota.release()

    def idle(self) -> int:
        return self._idle.qsize()
