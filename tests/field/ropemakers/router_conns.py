"""Router to model replicas: pooled HTTP/1.1 connections with streaming responses."""
from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections import defaultdict
from typing import Any, Dict, Generator, Iterator, List, Optional, Tuple

log = logging.getLogger("router")
Addr = Tuple[str, int]


class ReplicaDown(ConnectionError):
    pass


class Conn:
    def __init__(self, addr: Addr):
        self.addr = addr
        self.http = http.client.HTTPConnection(*addr, timeout=30)
        self.idle_since = 0.0
        self.bad = False


class ConnPool:
    def __init__(self, cap_per_host: int, max_idle: float = 60.0):
        self.cap = cap_per_host
        self.max_idle = max_idle
        self._idle: Dict[Addr, List[Conn]] = defaultdict(list)
        self._count: Dict[Addr, int] = defaultdict(int)
        self._mu = threading.Lock()

    def _pop_fresh(self, addr: Addr) -> Optional[Conn]:
        while self._idle[addr]:
            c = self._idle[addr].pop()  # clean: near miss, a stale one is closed and uncounted
            if time.monotonic() - c.idle_since < self.max_idle:
                return c
            c.http.close()
            self._count[addr] -= 1
        return None

    def dial(self, addr: Addr) -> Conn:
        with self._mu:
            c = self._pop_fresh(addr)  # clean: returned to the caller
            if c is not None:
                return c
            if self._count[addr] >= self.cap:
                raise ReplicaDown(f"{addr}: all connections busy")
            self._count[addr] += 1
        return Conn(addr)

    def hang_up(self, c: Conn) -> None:
        with self._mu:
            if c.bad:
                c.http.close()
                self._count[c.addr] -= 1
                return
            c.idle_since = time.monotonic()
            self._idle[c.addr].append(c)

    def trim(self, addr: Addr) -> int:
        """Close idle connections above half of the cap."""
        closed = 0
        with self._mu:
            while len(self._idle[addr]) > self.cap // 2:
                c = self._idle[addr].pop()  # leak: closed but still counted, so the cap shrinks for good
                c.http.close()
                closed += 1
        return closed


class Checked:
    """Pool wrapper which pings a connection before handing it out."""

    def __init__(self, pool: ConnPool, tries: int = 2):
        self.pool = pool
        self.tries = tries

    def _ping(self, c: Conn) -> bool:
        try:
            c.http.request("GET", "/health")
            return c.http.getresponse().read() is not None
        except OSError:
            return False

    def dial(self, addr: Addr) -> Conn:
        for _ in range(self.tries):
            c = self.pool.dial(addr)  # leak: a connection that fails the ping is dropped for the next try
            if self._ping(c):
                return c
        raise ReplicaDown(str(addr))

    def dial_strict(self, addr: Addr) -> Conn:
        for _ in range(self.tries):
            c = self.pool.dial(addr)  # clean: near miss, marked bad and hung up before the next try
            if self._ping(c):
                return c
            c.bad = True
            self.pool.hang_up(c)
        raise ReplicaDown(str(addr))

    def hang_up(self, c: Conn) -> None:
        self.pool.hang_up(c)


class Lease:
    def __init__(self, pool: Checked, addr: Addr):
        self.pool = pool
        self.conn = pool.dial_strict(addr)  # clean: owned by the lease, hung up in __exit__

    def __enter__(self) -> Conn:
        return self.conn

    def __exit__(self, et, ev, tb) -> None:
        self.conn.bad = self.conn.bad or et is not None
        self.pool.hang_up(self.conn)


class LazyLease:
    """Dials on first use."""

    def __init__(self, pool: Checked, addr: Addr):
        self.pool = pool
        self.addr = addr
        self.conn: Optional[Conn] = None

    def get(self) -> Conn:
        if self.conn is None:
            self.conn = self.pool.dial_strict(self.addr)  # leak: __exit__ returns early on an error in the body
        return self.conn

    def __enter__(self) -> "LazyLease":
        return self

    def __exit__(self, et, ev, tb) -> Optional[bool]:
        if self.conn is None:
            return None
        if et is not None and issubclass(et, http.client.HTTPException):
            log.warning("%s: %s", self.addr, ev)
            return True
        self.pool.hang_up(self.conn)
        self.conn = None
        return None


class Router:
    def __init__(self, pool: ConnPool, replicas: List[Addr]):
        self.pool = pool
        self.checked = Checked(pool)
        self.replicas = replicas
        self.sticky: Dict[str, Conn] = {}

    def post(self, addr: Addr, body: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        c = self.pool.dial(addr)  # leak: a status other than 200 returns None with the connection
        c.http.request("POST", "/generate", json.dumps(body))
        resp = c.http.getresponse()
        if resp.status != 200:
            log.warning("%s answered %d", addr, resp.status)
            return None
        data = json.loads(resp.read())
        self.pool.hang_up(c)
        return data

    def post_any(self, body: Dict[str, Any]) -> Dict[str, Any]:
        for addr in self.replicas:
            c = None
            try:
                c = self.pool.dial(addr)  # clean: the finally of each turn hangs up
                c.http.request("POST", "/generate", json.dumps(body))
                resp = c.http.getresponse()
                if resp.status >= 500:
                    continue
                return json.loads(resp.read())
            except OSError as e:
                if c is not None:
                    c.bad = True
                log.info("%s: %s", addr, e)
            finally:
                if c is not None:
                    self.pool.hang_up(c)
        raise ReplicaDown("no replica answered")

    def metrics(self, addr: Addr) -> str:
        with Lease(self.checked, addr) as c:  # clean: context manager
            c.http.request("GET", "/metrics")
            return c.http.getresponse().read().decode()

    def queue_depth(self, addr: Addr) -> int:
        with Lease(self.checked, addr) as c:  # clean: context manager
            c.http.request("GET", "/queue")
            return int(c.http.getresponse().read())

    # -- streaming -----------------------------------------------------------

    def stream(self, addr: Addr, body: Dict[str, Any]) -> Generator[bytes, None, None]:
        c = self.pool.dial(addr)  # clean: hung up in finally, also when the client goes away
        finished = False
        try:
            c.http.request("POST", "/stream", json.dumps(body))
            resp = c.http.getresponse()
            while True:
                line = resp.readline()
                if not line:
                    break
                yield line
            finished = True
        finally:
            c.bad = not finished
            self.pool.hang_up(c)

    def stream_until(self, addr: Addr, body: Dict[str, Any], stop: bytes) -> Iterator[bytes]:
        c = self.pool.dial(addr)  # leak: the stop string ends the generator before the hang_up
        c.http.request("POST", "/stream", json.dumps(body))
        for line in c.http.getresponse():
            yield line
            if stop in line:
                return
        self.pool.hang_up(c)

    # -- sticky sessions -------------------------------------------------------

    def conn_for(self, session: str, addr: Addr) -> Conn:
        c = self.sticky.get(session)
        if c is not None and c.addr == addr:
            return c
        if c is not None:
            self.pool.hang_up(self.sticky.pop(session))
        c = self.pool.dial(addr)  # clean: near miss, kept in sticky, end_session() or shutdown() hangs up
        self.sticky[session] = c
        return c

    def migrate(self, session: str, addr: Addr) -> bool:
        fresh = self.pool.dial(addr)  # clean: takes the session's place, or is hung up when there is none
        old = self.sticky.pop(session, None)
        if old is None:
            self.pool.hang_up(fresh)
            return False
        self.sticky[session] = fresh
        self.pool.hang_up(old)
        return True

    def end_session(self, session: str) -> None:
        c = self.sticky.pop(session, None)
        if c is not None:
            self.pool.hang_up(c)

    def shutdown(self) -> None:
        for session in list(self.sticky):
            self.end_session(session)
