import logging
import uuid
from typing import Any, Dict, List, Optional

from .pool import Conn, ConnPool, RunLocks
from .uploads import Uploader

log = logging.getLogger("tracker.runs")


class RunService:
    def __init__(self, pool: ConnPool, locks: RunLocks, uploader: Uploader, owner: str):
        self.pool = pool
        self.locks = locks
        self.uploader = uploader
        self.owner = owner
        self.live: Dict[str, Conn] = {}

    def start(self, params: Dict[str, Any]) -> Optional[str]:
        conn = self.pool.getconn_alive()  # clean: kept in live until finish() or crash() puts it back
        if conn is None:
            return None
        run_id = uuid.uuid4().hex
        if not self.locks.lock_run(run_id, self.owner):  # leak: crash() puts the connection back and never unlocks the run
            self.pool.putconn(conn)
            return None
        conn.store(run_id, {"params": params, "state": "running"})
        self.live[run_id] = conn
        return run_id

    def finish(self, run_id: str) -> None:
        conn = self.live.pop(run_id, None)
        if conn is None:
            return
        row = conn.fetch(run_id) or {}
        conn.store(run_id, {**row, "state": "finished"})
        self.pool.putconn(conn)
        self.locks.unlock_run(run_id)

    def crash(self, run_id: str, reason: str) -> None:
        conn = self.live.pop(run_id, None)
        if conn is None:
            return
        log.error("run %s crashed: %s", run_id, reason)
        conn.dead = True
        self.pool.putconn(conn)

    def tag(self, run_id: str, tags: List[str]) -> bool:
        if not self.locks.lock_run(run_id, self.owner):  # clean: near miss, unlocked with and without a connection
            return False
        conn = self.pool.getconn()  # leak: an unknown run unlocks and returns, the connection stays out
        if conn is None:
            self.locks.unlock_run(run_id)
            return False
        row = conn.fetch(run_id)
        if row is None:
            self.locks.unlock_run(run_id)
            return False
        row["tags"] = sorted(set(tags))
        self.pool.putconn(conn)
        self.locks.unlock_run(run_id)
        return True

    def merge(self, a: str, b: str) -> bool:
        if not self.locks.lock_pair(a, b, self.owner):  # clean: near miss, both unlocked in finally
            return False
        try:
            conn = self.pool.getconn()  # clean: near miss, put back before each return
            if conn is None:
                return False
            left, right = conn.fetch(a), conn.fetch(b)
            if left is None or right is None:
                self.pool.putconn(conn)
                return False
            conn.store(a, {**left, **right})
            self.pool.putconn(conn)
            return True
        finally:
            self.locks.unlock_run(a)
            self.locks.unlock_run(b)
