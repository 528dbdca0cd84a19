"""Session gateway: upstream connections, per-tenant permits, sticky sessions."""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional

logger = logging.getLogger(__name__)


class UpstreamError(Exception):
    pass


class Connection:
    def __init__(self, host: str) -> None:
        self.host = host
        self.broken = False

    def request(self, body: bytes) -> bytes:
        if self.broken:
            raise UpstreamError(self.host)
        return body[::-1]

    def stream(self, body: bytes) -> Iterator[bytes]:
        for i in range(0, len(body), 16):
            yield body[i:i + 16]


class ConnectionPool:
    def __init__(self, host: str, limit: int) -> None:
        self._idle: List[Connection] = [Connection(host) for _ in range(limit)]
        self._lock = threading.Lock()

    def get(self) -> Optional[Connection]:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def put(self, conn: Connection) -> None:
        conn.broken = False
        with self._lock:
            self._idle.append(conn)


class TenantPermits:
    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self._active: Dict[str, int] = {}
        self._lock = threading.Lock()

    def admit(self, tenant: str) -> bool:
        with self._lock:
            n = self._active.get(tenant, 0)
            if n >= self.per_tenant:
                return False
            self._active[tenant] = n + 1
            return True

    def depart(self, tenant: str) -> None:
        with self._lock:
            self._active[tenant] -= 1


@dataclass
class Session:
    sid: str
    tenant: str
    conn: Connection
    last_used: float
    side: Optional[Connection] = None


class Gateway:
    def __init__(self, pool: ConnectionPool, permits: TenantPermits, ttl: float = 60.0) -> None:
        self.pool = pool
        self.permits = permits
        self.ttl = ttl
        self.sessions: Dict[str, Session] = {}
        self.on_close: List[Callable[[], None]] = []

    def open(self, sid: str, tenant: str) -> bool:
        if sid in self.sessions:
            return True
        if not self.permits.admit(tenant):  # clean: near miss, departs when no connection is idle, else with the session
            return False
        conn = self.pool.get()  # clean: near miss, owned by the session, close() and expire() put it
        if conn is None:
            self.permits.depart(tenant)
            return False
        self.sessions[sid] = Session(sid, tenant, conn, time.monotonic())
        return True

    def call(self, tenant: str, body: bytes) -> Optional[bytes]:
        if not self.permits.admit(tenant):  # leak: the handled upstream error returns before depart
            return None
        conn = self.pool.get()  # clean: near miss, the handler puts it as well as the ordinary end
        if conn is None:
            self.permits.depart(tenant)
            return None
        try:
            reply = conn.request(body)
        except UpstreamError:
            self.pool.put(conn)
            return None
        self.pool.put(conn)
        self.permits.depart(tenant)
        return reply

    def call_retry(self, body: bytes, attempts: int = 3) -> Optional[bytes]:
        for attempt in range(attempts):
            conn = self.pool.get()  # leak: a broken connection is left behind by the continue in the handler
            if conn is None:
                return None
            try:
                reply = conn.request(body)
            except UpstreamError:
                logger.info("attempt %d failed at %s", attempt, conn.host)
                continue
            self.pool.put(conn)
            return reply
        return None

    def call_session(self, sid: str, body: bytes) -> Optional[bytes]:
        session = self.sessions.get(sid)
        conn = session.conn if session is not None else self.pool.get()  # clean: near miss, put by the finally under the same condition
        if conn is None:
            return None
        try:
            return conn.request(body)
        except UpstreamError:
            return None
        finally:
            if session is None:
                self.pool.put(conn)
            else:
                session.last_used = time.monotonic()

    def open_side(self, sid: str) -> bool:
        session = self.sessions[sid]
        if session.side is not None:
            return True
        session.side = self.pool.get()  # leak: expire() puts only the main connection of an idle session
        return session.side is not None

    def stream(self, body: bytes) -> Iterator[bytes]:
        conn = self.pool.get()  # clean: near miss, the finally runs also when the consumer closes the generator
        if conn is None:
            return
        try:
            yield from conn.stream(body)
        finally:
            self.pool.put(conn)

    def stream_until(self, body: bytes, stop: bytes) -> Iterator[bytes]:
        conn = self.pool.get()  # leak: the return on the stop chunk passes by put
        if conn is None:
            return
        for chunk in conn.stream(body):
            if stop in chunk:
                return
            yield chunk
        self.pool.put(conn)

    def hedge(self, body: bytes) -> Optional[bytes]:
        first = self.pool.get()  # clean: put in every way
        if first is None:
            return None
        second = self.pool.get()  # clean: near miss, None is no holding, otherwise put with the first
        try:
            return first.request(body)
        except UpstreamError:
            return second.request(body) if second is not None and not second.broken else None
        finally:
            for conn in (first, second):
                if conn is not None:
                    self.pool.put(conn)

    def subscribe(self) -> Optional[Connection]:
        conn = self.pool.get()  # clean: near miss, its put is registered for shutdown
        if conn is None:
            return None
        self.on_close.append(lambda: self.pool.put(conn))
        return conn

    def close(self, sid: str) -> bool:
        session = self.sessions.pop(sid, None)
        if session is None:
            return False
        self.pool.put(session.conn)
        if session.side is not None:
            self.pool.put(session.side)
        self.permits.depart(session.tenant)
        return True

    def expire(self, now: float) -> int:
        stale = [s for s in self.sessions.values() if now - s.last_used > self.ttl]
        for session in stale:
            del self.sessions[session.sid]
            self.pool.put(session.conn)
            self.permits.depart(session.tenant)
        return len(stale)

    def shutdown(self) -> None:
        for sid in list(self.sessions):
            self.close(sid)
        while self.on_close:
            self.on_close.pop()()
