"""Connections to the feature tables."""
from __future__ import annotations

import sqlite3
import threading
from contextlib import contextmanager


class TablePool:
    def __init__(self, path: str, size: int) -> None:
        self._path = path
        self._size = size
        self._lock = threading.Lock()
        self._open: list[sqlite3.Connection] = []
        self._idle: list[sqlite3.Connection] = []

    def get(self) -> sqlite3.Connection | None:
        with self._lock:
            if self._idle:
                return self._idle.pop()  # clean: handed to the caller
            if len(self._open) >= self._size:
                return None
            conn = sqlite3.connect(self._path, check_same_thread=False)  # clean: kept in the open list, closed by close_all
            self._open.append(conn)
            return conn

    def put(self, conn: sqlite3.Connection) -> None:
        with self._lock:
            self._idle.append(conn)

    @contextmanager
    def borrowed(self):
        conn = self.get()  # clean: near miss, put after the yield in the finally unless None
        try:
            yield conn
        finally:
            if conn is not None:
                self.put(conn)

    def close_all(self) -> None:
        with self._lock:
            for conn in self._open:
                conn.close()
            self._open.clear()
            self._idle.clear()
