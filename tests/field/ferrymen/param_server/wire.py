"""Connections to the servers, and a pool of them per endpoint."""
from __future__ import annotations

import collections
import socket
import struct
import threading
import time
from typing import Optional

FRAME = struct.Struct("<IHH")


class Connection:
    def __init__(self, endpoint: tuple[str, int]) -> None:
        self.endpoint = endpoint
        self.sock = socket.create_connection(endpoint, timeout=5.0)
        self.last_used = time.monotonic()
        self.broken = False

    def call(self, op: int, body: bytes) -> bytes:
        self.sock.sendall(FRAME.pack(len(body), op, 0) + body)
        head = self._exactly(FRAME.size)
        if head is None:
            self.broken = True
            return b""
        size, _, status = FRAME.unpack(head)
        reply = self._exactly(size)
        if reply is None or status:
            self.broken = reply is None
            return b""
        return reply

    def _exactly(self, n: int) -> Optional[bytes]:
        parts = []
        while n:
            piece = self.sock.recv(n)
            if not piece:
                return None
            parts.append(piece)
            n -= len(piece)
        return b"".join(parts)

    def shut(self) -> None:
        self.sock.close()


class ConnectionPool:
    """At most `width` connections per endpoint, counted whether idle or lent."""

    def __init__(self, width: int, idle_limit: float = 120.0) -> None:
        self.width = width
        self.idle_limit = idle_limit
        self._idle: dict[tuple, collections.deque] = collections.defaultdict(collections.deque)
        self._count: dict[tuple, int] = collections.Counter()
        self._cv = threading.Condition()

    def lend(self, endpoint: tuple[str, int], wait: float = 5.0) -> Optional[Connection]:
        with self._cv:
            ok = self._cv.wait_for(lambda: self._idle[endpoint] or self._count[endpoint] < self.width, wait)
            if not ok:
                return None
            if self._idle[endpoint]:
                return self._idle[endpoint].popleft()
            self._count[endpoint] += 1
        return Connection(endpoint)  # clean: lent to the caller

    def take_back(self, conn: Connection) -> None:
        with self._cv:
            if conn.broken:
                conn.shut()
                self._count[conn.endpoint] -= 1
            else:
                conn.last_used = time.monotonic()
                self._idle[conn.endpoint].append(conn)
            self._cv.notify()

    def prune(self) -> int:
        pruned = 0
        horizon = time.monotonic() - self.idle_limit
        with self._cv:
            for endpoint, idle in self._idle.items():
                while idle and idle[0].last_used < horizon:
                    idle.popleft().shut()
                    self._count[endpoint] -= 1
                    pruned += 1
        return pruned

    def greet(self, endpoint: tuple[str, int], tries: int = 3) -> Optional[Connection]:
        """A connection that answers a ping."""
        for _ in range(tries):
            conn = self.lend(endpoint)  # clean: returned, or taken back when it is silent
            if conn is None:
                continue
            if conn.call(0, b"ping") == b"pong":
                return conn
            conn.broken = True
            self.take_back(conn)
        return None

    def greet_fast(self, endpoint: tuple[str, int], tries: int, limit: float) -> Optional[Connection]:
        """A connection that answers within the limit."""
        for _ in range(tries):
            conn = self.lend(endpoint)  # leak: slow ones are dropped
            if conn is None:
                return None
            began = time.monotonic()
            conn.call(0, b"ping")
            if time.monotonic() - began < limit:
                return conn
        return None
