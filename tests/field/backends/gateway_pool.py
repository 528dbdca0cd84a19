"""Threaded gateway in front of a small set of model backends."""
from __future__ import annotations

import logging
import threading
import time
from collections import deque

log = logging.getLogger("gateway")


class Backend:
    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False
        self.calls = 0

    def ping(self) -> bool:
        return not self.closed

    def call(self, method: str, payload: object) -> dict:
        if self.closed:
            raise ConnectionError(self.address)
        self.calls += 1
        return {"status": 200, "method": method, "body": payload}


class BackendPool:
    """Fixed stock of backends; checkout() answers None when it times out."""

    def __init__(self, addresses: list[str]) -> None:
        self._idle: deque[Backend] = deque(Backend(a) for a in addresses)
        self._cond = threading.Condition()
        self.replaced = 0

    def checkout(self, timeout: float = 1.0) -> Backend | None:
        deadline = time.monotonic() + timeout
        with self._cond:
            while not self._idle:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._cond.wait(remaining)
            return self._idle.popleft()  # clean: handed to the caller

    def checkout_matching(self, address: str) -> Backend | None:
        with self._cond:
            for _ in range(len(self._idle)):
                conn = self._idle.popleft()  # clean: near miss, a mismatch is rotated to the back of the queue
                if conn.address == address:
                    return conn
                self._idle.append(conn)
        return None

    def checkin(self, conn: Backend) -> None:
        with self._cond:
            self._idle.append(conn)
            self._cond.notify()

    def replace(self, conn: Backend) -> None:
        """Gives the slot back with a fresh connection in place of a broken one."""
        with self._cond:
            self.replaced += 1
            self._idle.append(Backend(conn.address))
            self._cond.notify()


class Gateway:
    def __init__(self, pool: BackendPool) -> None:
        self._pool = pool

    def complete(self, prompt: str) -> dict:
        conn = self._pool.checkout()  # clean: checked in by the finally
        if conn is None:
            return {"status": 503}
        try:
            return conn.call("complete", prompt)
        finally:
            self._pool.checkin(conn)

    def embed(self, texts: list[str]) -> dict:
        conn = self._pool.checkout()  # leak: the non-200 return keeps the connection
        if conn is None:
            return {"status": 503}
        reply = conn.call("embed", texts)
        if reply["status"] != 200:
            log.warning("embed on %s: %s", conn.address, reply["status"])
            return {"status": 502, "detail": reply}
        self._pool.checkin(conn)
        return reply

    def mirror(self, prompt: str) -> tuple[dict, dict] | None:
        primary = self._pool.checkout()  # leak: stays held when the shadow is refused
        if primary is None:
            return None
        shadow = self._pool.checkout(0.05)  # clean: near miss, None when refused, else the finally returns it
        if shadow is None:
            log.info("no shadow backend for mirrored call")
            return None
        try:
            return primary.call("complete", prompt), shadow.call("complete", prompt)
        finally:
            self._pool.checkin(shadow)
            self._pool.checkin(primary)

    def call_with_retry(self, method: str, payload: object, attempts: int = 3) -> dict | None:
        for attempt in range(attempts):
            conn = self._pool.checkout()  # leak: the handler goes round without giving back the failed one
            if conn is None:
                continue
            try:
                reply = conn.call(method, payload)
            except ConnectionError as exc:
                log.warning("attempt %d: %s", attempt, exc)
                time.sleep(0.05 * (attempt + 1))
                continue
            self._pool.checkin(conn)
            return reply
        return None

    def probe(self, address: str) -> bool:
        conn = self._pool.checkout_matching(address)  # clean: near miss, the broken one goes back through replace
        if conn is None:
            return False
        if not conn.ping():
            self._pool.replace(conn)
            return False
        self._pool.checkin(conn)
        return True


class StickySessions:
    """Keeps one backend per chat session until the session is closed."""

    def __init__(self, pool: BackendPool) -> None:
        self._pool = pool
        self._by_sid: dict[str, Backend] = {}

    def attach(self, sid: str, address: str) -> bool:
        conn = self._pool.checkout_matching(address)  # leak: a second attach overwrites the session's held backend
        if conn is None:
            return False
        self._by_sid[sid] = conn
        return True

    def ensure(self, sid: str) -> Backend | None:
        conn = self._by_sid.get(sid)
        if conn is None:
            conn = self._pool.checkout()  # clean: near miss, only taken when the session has none, then tabled
            if conn is not None:
                self._by_sid[sid] = conn
        return conn

    def detach(self, sid: str) -> None:
        conn = self._by_sid.pop(sid, None)
        if conn is not None:
            self._pool.checkin(conn)

    def shutdown(self) -> None:
        for sid in list(self._by_sid):
            self.detach(sid)
