"""Warm connections to model replicas, one pool per endpoint, and the router above them."""
from __future__ import annotations

import collections
import contextlib
import logging
import random
import threading
import time
from typing import Iterator

log = logging.getLogger("replica_conns")


class ReplicaDown(Exception):
    pass


class Conn:
    __slots__ = ("endpoint", "wire", "uses", "broken", "born")

    def __init__(self, endpoint: str, wire) -> None:
        self.endpoint = endpoint
        self.wire = wire
        self.uses = 0
        self.broken = False
        self.born = time.monotonic()

    def roundtrip(self, payload: bytes) -> bytes | None:
        self.uses += 1
        self.wire.send(payload)
        reply = self.wire.recv()
        if reply is None:
            self.broken = True
        return reply

    def frames(self, payload: bytes) -> Iterator[bytes]:
        self.wire.send(payload)
        while True:
            frame = self.wire.recv()
            if frame is None:
                return
            yield frame

    @property
    def age(self) -> float:
        return time.monotonic() - self.born


class EndpointPool:
    def __init__(self, endpoint: str, wires: list, max_age: float = 300.0) -> None:
        self.endpoint = endpoint
        self.max_age = max_age
        self._idle = collections.deque(Conn(endpoint, w) for w in wires)
        self._lock = threading.Lock()
        self.borrowed = 0

    def borrow(self) -> Conn | None:
        with self._lock:
            if not self._idle:
                return None
            conn = self._idle.pop()  # clean: returned to the caller
            self.borrowed += 1
            return conn

    def give_back(self, conn: Conn) -> None:
        with self._lock:
            self.borrowed -= 1
            self._idle.append(conn)

    def reset(self, conn: Conn) -> None:
        """Take a broken connection back: the wire is redialled and it goes idle again."""
        conn.wire.redial()
        conn.broken = False
        conn.born = time.monotonic()
        self.give_back(conn)

    @contextlib.contextmanager
    def lease(self):
        conn = self.borrow()  # clean: given back or reset in finally
        if conn is None:
            raise ReplicaDown(self.endpoint)
        try:
            yield conn
        finally:
            if conn.broken:
                self.reset(conn)
            else:
                self.give_back(conn)


class Router:
    def __init__(self, pools: dict[str, EndpointPool]) -> None:
        self.pools = pools
        self._sticky: dict[str, tuple[EndpointPool, Conn]] = {}
        self._shadow: dict[str, Conn] = {}

    def _order(self) -> list[EndpointPool]:
        pools = list(self.pools.values())
        random.shuffle(pools)
        return pools

    def call(self, payload: bytes) -> bytes:
        for pool in self._order():
            conn = pool.borrow()  # leak: continue on an empty reply skips give_back
            if conn is None:
                continue
            reply = conn.roundtrip(payload)
            if reply is None:
                log.warning("replica %s sent no reply", pool.endpoint)
                continue
            pool.give_back(conn)
            return reply
        raise ReplicaDown("all")

    def call_hedged(self, payload: bytes) -> bytes | None:
        a, b = self._order()[:2]
        first = a.borrow()  # leak: kept when the second endpoint has no connection
        if first is None:
            return None
        second = b.borrow()  # clean: given back in finally
        if second is None:
            return None
        try:
            return first.roundtrip(payload) or second.roundtrip(payload)
        finally:
            a.give_back(first)
            b.give_back(second)

    def ping_all(self) -> dict[str, bool]:
        up = {}
        for name, pool in self.pools.items():
            try:
                with pool.lease() as conn:  # clean: context manager
                    up[name] = conn.roundtrip(b"PING") == b"PONG"
            except ReplicaDown:
                up[name] = False
        return up

    def warm(self, name: str, n: int) -> int:
        pool = self.pools[name]
        held: list[Conn] = []
        while len(held) < n:
            conn = pool.borrow()  # clean: near miss, collected in held and all given back below
            if conn is None:
                break
            held.append(conn)
        for conn in held:
            conn.wire.keepalive()
        while held:
            pool.give_back(held.pop())
        return n

    def stream_tokens(self, name: str, payload: bytes, stop: bytes) -> Iterator[bytes]:
        pool = self.pools[name]
        conn = pool.borrow()  # leak: return on the stop token passes over give_back
        if conn is None:
            raise ReplicaDown(name)
        for frame in conn.frames(payload):
            if frame == stop:
                return
            yield frame
        pool.give_back(conn)

    def fetch_config(self, primary: str, secondary: str) -> bytes | None:
        pool = self.pools[primary]
        conn = pool.borrow()  # leak: rebound to the secondary's connection when too old
        if conn is not None and conn.age > pool.max_age:
            pool = self.pools[secondary]
            conn = pool.borrow()  # clean: given back to the pool it came from
        if conn is None:
            return None
        reply = conn.roundtrip(b"CONFIG")
        pool.give_back(conn)
        return reply

    def fetch_stats(self, name: str) -> bytes | None:
        pool = self.pools[name]
        conn = pool.borrow()  # clean: near miss, reset before the name is rebound
        if conn is not None and conn.age > pool.max_age:
            pool.reset(conn)
            conn = pool.borrow()  # clean: given back below
        if conn is None:
            return None
        reply = conn.roundtrip(b"STATS")
        pool.give_back(conn)
        return reply

    def open_session(self, sid: str, name: str) -> bool:
        if sid in self._sticky:
            return True
        pool = self.pools[name]
        conn = pool.borrow()  # clean: kept in _sticky, which end_session empties
        if conn is None:
            return False
        self._sticky[sid] = (pool, conn)
        return True

    def end_session(self, sid: str) -> None:
        entry = self._sticky.pop(sid, None)
        if entry is not None:
            pool, conn = entry
            pool.give_back(conn)

    def mirror_to(self, name: str) -> None:
        conn = self.pools[name].borrow()  # leak: a second call for the name overwrites the entry of the first
        if conn is not None:
            self._shadow[name] = conn

    def stop_mirrors(self) -> None:
        for name, conn in self._shadow.items():
            self.pools[name].give_back(conn)
        self._shadow.clear()
