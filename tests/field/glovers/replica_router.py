"""Threaded router over replicas: connection leases, in-flight counters, sticky sessions."""
from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

LOG = logging.getLogger("router")


@dataclass
class Conn:
    replica: str
    healthy: bool = True
    born: float = field(default_factory=time.monotonic)

    def request(self, body: dict) -> dict:
        return {"replica": self.replica, **body}


class ConnPool:
    def __init__(self, replica: str, size: int):
        self.replica = replica
        self.size = size
        self._q: queue.Queue[Conn] = queue.Queue()
        for _ in range(size):
            self._q.put(Conn(replica))

    def lease(self, timeout: float = 1.0) -> Conn | None:
        try:
            return self._q.get(timeout=timeout)
        except queue.Empty:
            return None

    def restore(self, conn: Conn) -> None:
        self._q.put(conn if conn.healthy else Conn(self.replica))


class Lease:
    """Scoped connection; detach() leaves it to the caller."""

    def __init__(self, pool: ConnPool):
        self.pool = pool
        self.conn: Conn | None = None

    def __enter__(self) -> "Lease":
        self.conn = self.pool.lease()  # clean: restored by __exit__ unless detached
        return self

    def detach(self) -> Conn | None:
        conn, self.conn = self.conn, None
        return conn

    def __exit__(self, *exc) -> None:
        if self.conn is not None:
            self.pool.restore(self.conn)
            self.conn = None


class Router:
    def __init__(self, pools: dict[str, ConnPool], workers: int = 8):
        self.pools = pools
        self.executor = ThreadPoolExecutor(workers)
        self.sticky: dict[str, tuple[str, Conn]] = {}
        self.table_lock = threading.Lock()
        self.stats: dict[str, int] = {}

    def _pick(self) -> ConnPool:
        return max(self.pools.values(), key=lambda p: p._q.qsize())

    def call(self, body: dict) -> dict | None:
        pool = self._pick()
        conn = pool.lease()  # clean: restored in the finally
        if conn is None:
            return None
        try:
            return conn.request(body)
        finally:
            pool.restore(conn)

    def call_checked(self, body: dict) -> dict | None:
        pool = self._pick()
        conn = pool.lease()  # leak: an unhealthy connection is dropped and the pool shrinks
        if conn is None:
            return None
        if not conn.healthy:
            LOG.warning("unhealthy connection to %s", conn.replica)
            return None
        answer = conn.request(body)
        pool.restore(conn)
        return answer

    def call_failover(self, body: dict) -> dict | None:
        for pool in self.pools.values():
            conn = pool.lease(0.1)  # clean: near miss, restored before the decision whether to go on
            if conn is None:
                continue
            answer = conn.request(body)
            pool.restore(conn)
            if answer.get("status") == "busy":
                continue
            return answer
        return None

    def call_hedged(self, body: dict) -> dict | None:
        """The fastest answer of two replicas."""
        first, second = list(self.pools.values())[:2]
        a = first.lease(0.05)  # clean: restored below if it was got
        b = second.lease(0.05)  # leak: when a answers, the return comes before the restore of b
        if a is not None:
            answer = a.request(body)
            first.restore(a)
            if answer.get("status") == "ok":
                return answer
        if b is not None:
            answer = b.request(body)
            second.restore(b)
            return answer
        return None

    def submit(self, body: dict) -> Future | None:
        pool = self._pick()
        conn = pool.lease()  # clean: near miss, the done callback restores it
        if conn is None:
            return None
        future = self.executor.submit(conn.request, body)
        future.add_done_callback(lambda _f: pool.restore(conn))
        return future

    def submit_logged(self, body: dict) -> Future | None:
        pool = self._pick()
        conn = pool.lease()  # leak: the callback only counts, the connection is in nobody's hands after the task
        if conn is None:
            return None

        def count(_f: Future) -> None:
            self.stats[conn.replica] = self.stats.get(conn.replica, 0) + 1

        future = self.executor.submit(conn.request, body)
        future.add_done_callback(count)
        return future

    def broadcast_quorum(self, body: dict, quorum: int) -> list[dict]:
        leased = {}
        for name, pool in self.pools.items():
            conn = pool.lease(0.2)  # leak: below the quorum the empty list is returned with leased forgotten
            if conn is not None:
                leased[name] = conn
        if len(leased) < quorum:
            return []
        answers = [c.request(body) for c in leased.values()]
        for name, conn in leased.items():
            self.pools[name].restore(conn)
        return answers

    # ---- sticky sessions -----------------------------------------------------------
    def begin_session(self, sid: str) -> bool:
        with self.table_lock:
            if sid in self.sticky:
                return True
        pool = self._pick()
        with Lease(pool) as lease:  # clean: near miss, detached only into sticky, which end_session restores
            if lease.conn is None:
                return False
            with self.table_lock:
                if sid in self.sticky:
                    return True
                self.sticky[sid] = (pool.replica, lease.detach())
        return True

    def session_call(self, sid: str, body: dict) -> dict | None:
        with self.table_lock:
            bound = self.sticky.get(sid)
        return bound[1].request(body) if bound else None

    def end_session(self, sid: str) -> None:
        with self.table_lock:
            bound = self.sticky.pop(sid, None)
        if bound is not None:
            replica, conn = bound
            self.pools[replica].restore(conn)

    def ping(self, replica: str) -> bool:
        conn = self.pools[replica].lease(0.2)  # leak: asked once and not restored on any way out
        if conn is None:
            return False
        answer = conn.request({"op": "ping"})
        self.stats[replica] = self.stats.get(replica, 0) + 1
        return answer.get("replica") == replica
