"""Connections to cache servers, checked out per request."""
from __future__ import annotations

import socket
from collections import deque
from contextlib import contextmanager
from typing import Deque, Dict, Iterator, List, Optional


class Conn:
    def __init__(self, addr: str, seq: int) -> None:
        self.addr = addr
        self.seq = seq
        self.broken = False
        self.sent: List[bytes] = []

    def call(self, payload: bytes) -> bytes:
        if self.broken:
            raise ConnectionError(self.addr)
        self.sent.append(payload)
        return payload[::-1]


class ConnPool:
    def __init__(self, addr: str, size: int) -> None:
        self.addr = addr
        self.size = size
        self.idle: Deque[Conn] = deque(Conn(addr, i) for i in range(size))
        self.out = 0

    def checkout(self) -> Optional[Conn]:
        while self.idle:
            conn = self.idle.popleft()  # clean: near miss, a broken one is reset and put back before continue
            if conn.broken:
                conn.broken = False
                self.idle.append(conn)
                continue
            self.out += 1
            return conn
        return None

    def checkout_newest(self, min_seq: int) -> Optional[Conn]:
        if not self.idle:
            return None
        conn = self.idle.pop()  # leak: a connection that is too old leaves the idle list and is dropped
        if conn.seq < min_seq:
            return None
        self.out += 1
        return conn

    def checkin(self, conn: Conn) -> None:
        self.out -= 1
        self.idle.append(conn)

    @contextmanager
    def session(self) -> Iterator[Optional[Conn]]:
        conn = self.checkout()  # clean: checked in by finally if there is one
        try:
            yield conn
        finally:
            if conn is not None:
                self.checkin(conn)


class Lease:
    """Lends one connection for the length of a with block."""

    def __init__(self, pool: ConnPool) -> None:
        self.pool = pool
        self.conn: Optional[Conn] = None

    def __enter__(self) -> Optional[Conn]:
        self.conn = self.pool.checkout()  # leak: __exit__ returns early for a timeout and keeps the connection
        return self.conn

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, socket.timeout):
            return True
        if self.conn is not None:
            self.pool.checkin(self.conn)
            self.conn = None
        return False


class QuietLease(Lease):
    def __enter__(self) -> Optional[Conn]:
        self.conn = self.pool.checkout()  # clean: near miss, the early return of __exit__ comes after the checkin
        return self.conn

    def __exit__(self, exc_type, exc, tb) -> bool:
        conn, self.conn = self.conn, None
        if conn is not None:
            self.pool.checkin(conn)
        if exc_type is None:
            return False
        return issubclass(exc_type, socket.timeout)


class RemoteClient:
    def __init__(self, pools: Dict[str, ConnPool]) -> None:
        self.pools = pools
        self.sticky: Dict[str, Conn] = {}

    def get(self, shard: str, key: bytes) -> Optional[bytes]:
        conn = self.pools[shard].checkout()  # clean: None-checked, finally checks it in
        if conn is None:
            return None
        try:
            return conn.call(b"GET " + key)
        except ConnectionError:
            conn.broken = True
            return None
        finally:
            self.pools[shard].checkin(conn)

    def put(self, shard: str, key: bytes, value: bytes) -> bool:
        pool = self.pools[shard]
        conn = pool.checkout()  # leak: the handler for a broken connection returns without a checkin
        if conn is None:
            return False
        try:
            conn.call(b"PUT " + key + b" " + value)
        except ConnectionError:
            conn.broken = True
            return False
        pool.checkin(conn)
        return True

    def put_retry(self, shard: str, payload: bytes, tries: int) -> bool:
        pool = self.pools[shard]
        for _ in range(tries):
            conn = pool.checkout()  # clean: near miss, each attempt checks in on success and in the handler
            if conn is None:
                continue
            try:
                conn.call(payload)
            except ConnectionError:
                conn.broken = True
                pool.checkin(conn)
                continue
            pool.checkin(conn)
            return True
        return False

    def pin_session(self, user: str, shard: str) -> bool:
        if user in self.sticky:
            return True
        conn = self.pools[shard].checkout()  # leak: end_session of another shard forgets the entry, nothing checks it in
        if conn is not None:
            self.sticky[user] = conn
        return conn is not None

    def end_session(self, user: str, shard: str) -> None:
        conn = self.sticky.pop(user, None)
        if conn is not None and conn.addr == self.pools[shard].addr:
            self.pools[shard].checkin(conn)

    def ping(self, shard: str) -> bool:
        with self.pools[shard].session() as conn:  # clean: context manager checks it in
            return conn is not None and conn.call(b"PING") == b"GNIP"
