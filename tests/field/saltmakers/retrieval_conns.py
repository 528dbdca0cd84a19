"""Connections to a vector database for retrieval-augmented generation.

`RawPool` owns sockets, `MeteredPool` adds a permit per tenant on top of it,
and `Session` is what the request handlers use.
"""
from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Any, Dict, List, Optional

log = logging.getLogger(__name__)


class PoolTimeout(Exception):
    pass


class Stale(Exception):
    pass


class Wire:
    def __init__(self, host: str, port: int):
        self.sock = socket.create_connection((host, port), timeout=5)  # clean: closed by close()
        self.born = time.time()

    def ping(self) -> bool:
        try:
            self.sock.sendall(b"\x00")
            return self.sock.recv(1) == b"\x00"
        except OSError:
            return False

    def query(self, vec: List[float], k: int) -> List[Dict[str, Any]]:
        self.sock.sendall(repr((vec, k)).encode())
        data = self.sock.recv(1 << 16)
        if not data:
            raise Stale()
        return [{"id": b} for b in data[:k]]

    def close(self) -> None:
        self.sock.close()


class RawPool:
    def __init__(self, host: str, port: int, size: int):
        self.addr = (host, port)
        self.size = size
        self.total = 0
        self.idle: List[Wire] = []
        self.cv = threading.Condition()

    def connect(self, timeout: float = 1.0) -> Wire:
        with self.cv:
            while not self.idle:
                if self.total < self.size:
                    self.total += 1
                    try:
                        return Wire(*self.addr)  # clean: handed to the caller
                    except OSError:
                        self.total -= 1
                        raise
                if not self.cv.wait(timeout):
                    raise PoolTimeout(self.addr)
            return self.idle.pop()  # clean: handed to the caller

    def connect_fresh(self, max_age: float) -> Wire:
        wire = self.connect()  # leak: an aged wire is replaced by another while the pool still counts it
        if time.time() - wire.born > max_age:
            wire = self.connect()  # clean: returned
        return wire

    def connect_checked(self) -> Wire:
        while True:
            wire = self.connect()  # clean: near miss, one that fails the ping is discarded before the next round
            if wire.ping():
                return wire
            self.discard(wire)

    def disconnect(self, wire: Wire) -> None:
        with self.cv:
            self.idle.append(wire)
            self.cv.notify()

    def discard(self, wire: Wire) -> None:
        wire.close()
        with self.cv:
            self.total -= 1
            self.cv.notify()


class MeteredPool:
    """A permit for the tenant, then a wire."""

    def __init__(self, raw: RawPool, per_tenant: int):
        self.raw = raw
        self.per_tenant = per_tenant
        self.held: Dict[str, int] = {}
        self.mu = threading.Lock()

    def permit(self, tenant: str) -> bool:
        with self.mu:
            n = self.held.get(tenant, 0)
            if n >= self.per_tenant:
                return False
            self.held[tenant] = n + 1
            return True

    def unpermit(self, tenant: str) -> None:
        with self.mu:
            self.held[tenant] -= 1

    def open(self, tenant: str) -> Optional[Wire]:
        if not self.permit(tenant):  # leak: PoolTimeout is answered with None and the tenant's permit stays counted
            return None
        try:
            return self.raw.connect()  # clean: handed to the caller with the permit
        except PoolTimeout:
            log.warning("no wire for %s", tenant)
            return None

    def open_checked(self, tenant: str) -> Optional[Wire]:
        if not self.permit(tenant):  # clean: near miss, unpermitted when no wire comes and else shut() does
            return None
        try:
            return self.raw.connect_checked()  # clean: handed to the caller with the permit
        except (PoolTimeout, OSError):
            self.unpermit(tenant)
            return None

    def shut(self, tenant: str, wire: Wire, broken: bool = False) -> None:
        self.unpermit(tenant)
        if broken:
            self.raw.discard(wire)
        else:
            self.raw.disconnect(wire)


class Session:
    def __init__(self, pool: MeteredPool, tenant: str):
        self.pool = pool
        self.tenant = tenant
        self.wire: Optional[Wire] = None
        self.hits = 0

    def __enter__(self) -> "Session":
        self.wire = self.pool.open_checked(self.tenant)  # leak: __exit__ returns before shut when the wire went stale
        if self.wire is None:
            raise PoolTimeout(self.tenant)
        return self

    def search(self, vec: List[float], k: int = 8) -> List[Dict[str, Any]]:
        rows = self.wire.query(vec, k)
        self.hits += len(rows)
        return rows

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is Stale:
            log.info("stale wire for %s", self.tenant)
            return True
        self.pool.shut(self.tenant, self.wire)
        self.wire = None
        return False


class Retriever:
    def __init__(self, pool: MeteredPool, embed):
        self.pool = pool
        self.embed = embed

    def lookup(self, tenant: str, text: str) -> List[Dict[str, Any]]:
        with Session(self.pool, tenant) as s:  # clean: with statement
            return s.search(self.embed(text))
        return []

    def lookup_retry(self, tenant: str, text: str, tries: int = 3) -> List[Dict[str, Any]]:
        vec = self.embed(text)
        for i in range(tries):
            wire = self.pool.open_checked(tenant)  # leak: a stale answer sleeps and opens the next without shut
            if wire is None:
                time.sleep(0.05)
                continue
            try:
                rows = wire.query(vec, 8)
            except Stale:
                time.sleep(0.1 * i)
                continue
            self.pool.shut(tenant, wire)
            return rows
        return []

    def lookup_retry_deadline(self, tenant: str, text: str, deadline: float) -> List[Dict[str, Any]]:
        vec = self.embed(text)
        while time.time() < deadline:
            wire = self.pool.open_checked(tenant)  # clean: near miss, shut as broken before every retry
            if wire is None:
                time.sleep(0.05)
                continue
            try:
                rows = wire.query(vec, 8)
            except Stale:
                self.pool.shut(tenant, wire, broken=True)
                continue
            self.pool.shut(tenant, wire)
            return rows
        return []

    def rerank(self, tenant: str, vecs: List[List[float]]) -> List[Dict[str, Any]]:
        wire = self.pool.open(tenant)  # leak: the early return for an empty first answer keeps the wire
        if wire is None:
            return []
        merged = wire.query(vecs[0], 32)
        if not merged:
            return merged
        for v in vecs[1:]:
            merged.extend(wire.query(v, 32))
        self.pool.shut(tenant, wire)
        return sorted(merged, key=lambda r: r["id"])
