"""Bounded pool of RPC connections to one shard."""
from __future__ import annotations

import logging
import threading
from typing import List, Optional

from .conn import ConnectFailed, Connection

logger = logging.getLogger(__name__)


class PoolTimeout(TimeoutError):
    pass


class ConnectionPool:

    def __init__(self, addr: str, size: int) -> None:
        self.addr = addr
        self._permits = threading.Semaphore(size)
        self._lock = threading.Lock()
        self._idle: List[Connection] = []

    def _pop_idle(self) -> Optional[Connection]:
        with self._lock:
            while self._idle:
                conn = self._idle.pop()
                if conn.healthy:
                    return conn
                conn.close()
        return None

    def acquire(self, timeout: float = 1.0) -> Connection:
        if not self._permits.acquire(timeout=timeout):  # clean: near miss, release() returns it and a failed connect does as well
            raise PoolTimeout(self.addr)
        conn = self._pop_idle()
        if conn is not None:
            return conn
        try:
            return Connection(self.addr)  # clean: handed to the caller, release() keeps or closes it
        except ConnectFailed:
            self._permits.release()
            raise

    def try_acquire(self) -> Optional[Connection]:
        if not self._permits.acquire(blocking=False):  # leak: a connect failure is turned into None, the permit stays taken
            return None
        conn = self._pop_idle()
        if conn is not None:
            return conn
        try:
            return Connection(self.addr)  # clean: handed to the caller, release() keeps or closes it
        except ConnectFailed as e:
            logger.warning("connect: %s", e)
            return None

    def release(self, conn: Connection) -> None:
        if conn.healthy:
            with self._lock:
                self._idle.append(conn)
        else:
            conn.close()
        self._permits.release()


class PooledConnection:

    def __init__(self, pool: ConnectionPool, timeout: float = 1.0) -> None:
        self._pool = pool
        self._timeout = timeout
        self._conn: Optional[Connection] = None

    def __enter__(self) -> Connection:
        self._conn = self._pool.acquire(self._timeout)  # clean: __exit__ releases it
        return self._conn

    def __exit__(self, exc_type, exc, tb) -> None:
        conn, self._conn = self._conn, None
        if exc_type is not None and issubclass(exc_type, ConnectionError):
            conn.healthy = False
        self._pool.release(conn)
