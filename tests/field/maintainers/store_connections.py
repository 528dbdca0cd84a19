"""Pooled connections to remote KV storage and the client on top."""
from __future__ import annotations

import threading
import time
from typing import Dict, List, Optional


class Channel:
    def __init__(self, host: str, ident: int):
        self.host = host
        self.ident = ident
        self.healthy = True
        self.data: Dict[str, bytes] = {}

    def get(self, key: str) -> Optional[bytes]:
        return self.data.get(key)

    def set(self, key: str, value: bytes) -> bool:
        if not self.healthy:
            return False
        self.data[key] = value
        return True

    def ping(self) -> bool:
        return self.healthy


class ChannelPool:
    def __init__(self, host: str, size: int):
        self._idle: List[Channel] = [Channel(host, i) for i in range(size)]
        self._permits = threading.BoundedSemaphore(size)
        self._mu = threading.Lock()

    def acquire(self, timeout: float = 1.0) -> Optional[Channel]:
        if not self._permits.acquire(timeout=timeout):  # clean: near miss, the failed wait holds nothing; release gives the permit back
            return None
        with self._mu:
            return self._idle.pop()  # clean: handed to the caller

    def acquire_healthy(self) -> Optional[Channel]:
        """A channel that answers a ping, or None."""
        if not self._permits.acquire(blocking=False):  # leak: when the ping fails the permit is not released
            return None
        with self._mu:
            ch = self._idle.pop()  # clean: near miss, a dead channel goes back to the idle list
        if not ch.ping():
            with self._mu:
                self._idle.append(ch)
            return None
        return ch

    def release(self, ch: Channel) -> None:
        with self._mu:
            self._idle.append(ch)
        self._permits.release()


class KVStoreClient:
    def __init__(self, pool: ChannelPool, retries: int = 3):
        self.pool = pool
        self.retries = retries
        self.sticky: Dict[str, Channel] = {}

    def fetch(self, key: str) -> Optional[bytes]:
        ch = self.pool.acquire()  # leak: a miss returns None with the channel held
        if ch is None:
            return None
        value = ch.get(key)
        if value is None:
            return None
        self.pool.release(ch)
        return value

    def fetch_or(self, key: str, default: bytes) -> bytes:
        ch = self.pool.acquire()  # clean: near miss, the return inside try passes the finally
        if ch is None:
            return default
        try:
            value = ch.get(key)
            if value is None:
                return default
            return value
        finally:
            self.pool.release(ch)

    def store(self, key: str, value: bytes) -> bool:
        for attempt in range(self.retries):
            ch = self.pool.acquire()  # leak: a refused set goes on to the next attempt without release
            if ch is None:
                continue
            if ch.set(key, value):
                self.pool.release(ch)
                return True
            time.sleep(0.01 * attempt)
        return False

    def store_careful(self, key: str, value: bytes) -> bool:
        for attempt in range(self.retries):
            ch = self.pool.acquire()  # clean: near miss, released before the outcome is looked at
            if ch is None:
                time.sleep(0.01)
                continue
            ok = ch.set(key, value)
            self.pool.release(ch)
            if ok:
                return True
        return False

    def connect(self) -> Optional[Channel]:
        """A channel for the caller, who releases it."""
        ch = None
        tries = 0
        while ch is None and tries < self.retries:
            ch = self.pool.acquire(timeout=0.1)  # clean: near miss, the loop only repeats for None; returned
            tries += 1
        return ch

    def exists(self, keys: List[str]) -> int:
        ch = self.connect()  # clean: released below on the one path on which it is not None
        if ch is None:
            return 0
        n = sum(1 for k in keys if ch.get(k) is not None)
        self.pool.release(ch)
        return n

    def first_present(self, keys: List[str]) -> Optional[str]:
        ch = self.connect()  # leak: a hit returns from inside the loop before release
        if ch is None:
            return None
        for k in keys:
            if ch.get(k) is not None:
                return k
        self.pool.release(ch)
        return None

    def pin_session(self, sid: str) -> bool:
        if sid in self.sticky:
            return True
        ch = self.pool.acquire_healthy()  # clean: kept in sticky, end_session releases it
        if ch is None:
            return False
        self.sticky[sid] = ch
        return True

    def end_session(self, sid: str) -> None:
        ch = self.sticky.pop(sid, None)
        if ch is not None:
            self.pool.release(ch)
