"""Database sessions and encode buffers, both limited in number."""

from __future__ import annotations

import logging
import sqlite3
import threading
from typing import Optional

logger = logging.getLogger(__name__)


class PoolTimeout(Exception):
    pass


class Session:
    """A database connection plus the depth of its open transactions."""

    def __init__(self, dsn: str) -> None:
        self.conn = sqlite3.connect(dsn, check_same_thread=False)
        self.depth = 0
        self.stale = False

    def execute(self, sql: str, *args: object) -> list[tuple]:
        return self.conn.execute(sql, args).fetchall()

    def ping(self) -> bool:
        try:
            self.conn.execute("select 1")
        except sqlite3.Error:
            return False
        return True


class SessionPool:
    def __init__(self, dsn: str, size: int) -> None:
        self.dsn = dsn
        self._mu = threading.Lock()
        self._slots = threading.Semaphore(size)
        self._rest: list[Session] = []

    def check_out(self, timeout: float = 3.0) -> Session:
        if not self._slots.acquire(timeout=timeout):  # clean: its permit is given up on a failed connect, and by check_in later
            raise PoolTimeout(self.dsn)
        with self._mu:
            if self._rest:
                return self._rest.pop()  # clean: returned
        try:
            return Session(self.dsn)
        except sqlite3.Error:
            self._slots.release()
            raise

    def check_out_alive(self, timeout: float = 3.0) -> Optional[Session]:
        """Like check_out, but makes sure that the session answers."""
        if not self._slots.acquire(timeout=timeout):  # leak: None for a dead session is returned with the permit still counted
            return None
        with self._mu:
            sess = self._rest.pop() if self._rest else Session(self.dsn)  # clean: closed when dead, returned when alive
        if not sess.ping():
            sess.conn.close()
            logger.warning("dead session")
            return None
        return sess

    def check_in(self, sess: Session) -> None:
        if sess.stale:
            sess.conn.close()
        else:
            with self._mu:
                self._rest.append(sess)
        self._slots.release()


class BufferPool:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._bufs = [bytearray(size) for _ in range(count)]

    def pick(self) -> Optional[bytearray]:
        return self._bufs.pop() if self._bufs else None  # clean: returned

    def replace(self, buf: bytearray) -> None:
        self._bufs.append(buf)
