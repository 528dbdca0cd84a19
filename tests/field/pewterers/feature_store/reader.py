from __future__ import annotations

import logging
import time
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

from .pool import Connection, ConnectionPool, StoreUnavailable

log = logging.getLogger(__name__)


class FeatureReader:
    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool

    def _healthy(self) -> Optional[Connection]:
        conn = self.pool.get_conn()  # clean: near miss, put back when the ping fails, else returned
        if conn is None:
            return None
        if not conn.ping():
            self.pool.put_conn(conn)
            return None
        return conn

    def read(self, key: str, default: Any = None) -> Any:
        conn = self._healthy()  # clean: put back in finally
        if conn is None:
            return default
        try:
            return conn.get(key)
        except StoreUnavailable:
            log.warning("store unavailable for %s", key)
            return default
        finally:
            self.pool.put_conn(conn)

    def read_or_default(self, key: str, default: Any) -> Any:
        conn = self._healthy()  # leak: StoreUnavailable is caught and returns without put_conn
        if conn is None:
            return default
        try:
            value = conn.get(key)
            self.pool.put_conn(conn)
        except StoreUnavailable:
            return default
        return default if value is None else value

    def read_retry(self, key: str, attempts: int = 3) -> Any:
        conn = None
        for attempt in range(attempts):
            conn = self.pool.get_conn()  # leak: rebound on the next attempt after an error
            if conn is None:
                time.sleep(0.001)
                continue
            try:
                value = conn.get(key)
            except StoreUnavailable:
                log.info("attempt %d failed", attempt)
                continue
            self.pool.put_conn(conn)
            return value
        return None

    def scan(self, keys: Iterable[str]) -> Iterator[Tuple[str, Any]]:
        conn = self.pool.get_conn()  # leak: a consumer that stops early closes the generator before put_conn
        if conn is None:
            return
        for key in keys:
            yield key, conn.get(key)
        self.pool.put_conn(conn)

    def first_present(self, keys: Iterable[str]) -> Optional[str]:
        for key, value in self.scan(keys):
            if value is not None:
                return key
        return None

    def scan_safe(self, keys: Iterable[str]) -> Iterator[Tuple[str, Any]]:
        conn = self.pool.get_conn()  # clean: near miss, the finally also runs when the generator is closed
        if conn is None:
            return
        try:
            for key in keys:
                yield key, conn.get(key)
        finally:
            self.pool.put_conn(conn)

    def last_present(self, keys: List[str]) -> Optional[str]:
        for key, value in self.scan_safe(list(reversed(keys))):
            if value is not None:
                return key
        return None

    def lookup(self, keys: List[str]) -> Dict[str, Any]:
        found: Dict[str, Any] = {}
        conn = self._healthy()  # leak: an empty key list returns early
        if conn is None:
            return found
        if not keys:
            return found
        for key in keys:
            found[key] = conn.get(key)
        self.pool.put_conn(conn)
        return found
