"""Forwards requests to the workers the policy picks."""
from __future__ import annotations

from .policy import CacheAware, PowerOfTwo
from .workers import ConnectionPool, WorkerRegistry


class Proxy:
    """Synchronous forwarding with retries."""

    def __init__(self, registry: WorkerRegistry, pool: ConnectionPool, policy: CacheAware | PowerOfTwo) -> None:
        self.registry = registry
        self.pool = pool
        self.policy = policy

    def generate(self, body: dict, attempts: int = 3) -> dict | None:
        """Forward one request, on another worker after a lost connection."""
        for _ in range(attempts):
            worker = self.policy.pick(body["prompt"])  # leak: after a connection error the loop goes on with the worker occupied
            if worker is None:
                return None
            conn = self.pool.get_conn(worker.url)  # clean: near miss, closed and put back in the handler too
            try:
                reply = conn.request(body)
            except ConnectionError:
                conn.close()
                self.pool.put_conn(conn)
                continue
            self.pool.put_conn(conn)
            self.registry.vacate(worker)
            return reply
        return None

    def health_check(self) -> int:
        """Probe all workers; returns the number of healthy ones."""
        healthy = 0
        for worker in self.registry.workers:
            conn = self.pool.get_conn(worker.url)  # leak: the continue for a failed probe does not put it back
            reply = conn.request({"path": "/health"})
            if reply.get("status") != 200:
                worker.healthy = False
                continue
            worker.healthy = True
            healthy += 1
            self.pool.put_conn(conn)
        return healthy

    def tokenize(self, body: dict) -> list[int]:
        """Any worker can tokenize; uses a picked one to balance the load."""
        worker = self.policy.pick(body["prompt"])  # leak: the worker is never vacated after the call
        if worker is None:
            return []
        conn = self.pool.get_conn(worker.url)  # clean: put back before the reply is read
        reply = conn.request({"path": "/tokenize", **body})
        self.pool.put_conn(conn)
        return reply.get("ids", [])

    def abort(self, rid: str) -> None:
        for worker in self.registry.workers:
            conn = self.pool.get_conn(worker.url)  # leak: returns from inside the loop while it holds the connection
            if conn.request({"path": "/abort", "rid": rid}).get("found"):
                return
            self.pool.put_conn(conn)
