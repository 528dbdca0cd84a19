from __future__ import annotations

import logging
from typing import Dict, Iterable, List, Optional

from .conn import Connection
from .pool import ConnectionPool, PooledConnection, PoolTimeout

logger = logging.getLogger(__name__)


class ShardClient:

    def __init__(self, pool: ConnectionPool, retries: int = 3) -> None:
        self.pool = pool
        self.retries = retries
        self.sticky: Dict[str, Connection] = {}

    def call(self, payload: bytes) -> bytes:
        with PooledConnection(self.pool) as conn:  # clean: context manager
            return conn.call(payload)

    def call_retrying(self, payload: bytes) -> Optional[bytes]:
        for attempt in range(self.retries):
            conn = self.pool.acquire()  # leak: a reset connection is not released before the next attempt
            try:
                reply = conn.call(payload)
            except ConnectionResetError:
                conn.close()
                logger.info("attempt %d reset", attempt)
                continue
            self.pool.release(conn)
            return reply
        return None

    def call_resilient(self, payload: bytes) -> Optional[bytes]:
        for attempt in range(self.retries):
            try:
                conn = self.pool.acquire(timeout=0.1)  # clean: near miss, the inner finally runs before the next attempt
            except PoolTimeout:
                continue
            try:
                return conn.call(payload)
            except ConnectionResetError:
                conn.healthy = False
            finally:
                self.pool.release(conn)
        return None

    def bind(self, session: str) -> Connection:
        conn = self.sticky.get(session)
        if conn is not None and conn.healthy:
            return conn
        conn = self.sticky[session] = self.pool.acquire()  # leak: an unhealthy sticky connection is overwritten, unreleased
        return conn

    def unbind(self, session: str) -> None:
        conn = self.sticky.pop(session, None)
        if conn is not None:
            self.pool.release(conn)

    def ping(self) -> bool:
        conn = self.pool.try_acquire()  # clean: released in the finally
        if conn is None:
            return False
        try:
            return conn.call(b"ping") == b"gnip"
        finally:
            self.pool.release(conn)
