"""Keep-alive sessions per host with an upper bound per host."""
from __future__ import annotations

import http.client
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from typing import Iterator, Optional


class Session:
    def __init__(self, host: str) -> None:
        self.host = host
        self.raw = http.client.HTTPSConnection(host, timeout=10)
        self.used = 0
        self.last = time.monotonic()

    def send(self, method: str, path: str, body: bytes = b"") -> "Reply":
        self.raw.request(method, path, body)
        answer = self.raw.getresponse()
        self.used += 1
        self.last = time.monotonic()
        return Reply(answer.status, dict(answer.getheaders()), answer.read())

    def idle_for(self) -> float:
        return time.monotonic() - self.last

    def shut(self) -> None:
        self.raw.close()


class Reply:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


class SessionPool:
    def __init__(self, per_host: int = 4, max_idle: float = 60.0) -> None:
        self.per_host = per_host
        self.max_idle = max_idle
        self._idle: dict[str, list[Session]] = defaultdict(list)
        self._count: dict[str, int] = defaultdict(int)
        self._cv = threading.Condition()

    def obtain(self, host: str) -> Session:
        with self._cv:
            while not self._idle[host] and self._count[host] >= self.per_host:
                self._cv.wait()
            if self._idle[host]:
                return self._idle[host].pop()
            self._count[host] += 1
        return Session(host)

    def obtain_nowait(self, host: str) -> Optional[Session]:
        with self._cv:
            if self._idle[host]:
                return self._idle[host].pop()
            if self._count[host] >= self.per_host:
                return None
            self._count[host] += 1
        return Session(host)

    def relinquish(self, session: Session) -> None:
        with self._cv:
            self._idle[session.host].append(session)
            self._cv.notify()

    def discard(self, session: Session) -> None:
        session.shut()
        with self._cv:
            self._count[session.host] -= 1
            self._cv.notify()

    def obtain_recent(self, host: str) -> Session:
        """A session that was used not long ago, or a new one."""
        session = self.obtain(host)  # clean: handed out, or discarded before the next one is obtained
        while session.used and session.idle_for() > self.max_idle:
            self.discard(session)
            session = self.obtain(host)  # clean: handed out, or discarded in the next round
        return session

    def obtain_any(self, hosts: list[str]) -> Optional[Session]:
        for host in hosts:
            session = self.obtain_nowait(host)  # clean: None-checked, handed to the caller
            if session is not None:
                return session
        return None

    def obtain_least_used(self, host: str) -> Optional[Session]:
        """Compares two sessions and hands out the one that has done less."""
        first = self.obtain_nowait(host)  # leak: when second wins, first is not given back
        if first is None:
            return None
        second = self.obtain_nowait(host)  # clean: given back when first wins, else handed out
        if second is None:
            return first
        if first.used <= second.used:
            self.relinquish(second)
            return first
        return second

    def prune(self, host: str) -> int:
        """Closes idle sessions that are too old."""
        keep: list[Session] = []
        pruned = 0
        for _ in range(self.per_host):
            session = self.obtain_nowait(host)  # leak: a session that is too old is shut but still counted
            if session is None:
                break
            if session.idle_for() > self.max_idle:
                session.shut()
                pruned += 1
                continue
            keep.append(session)
        for session in keep:
            self.relinquish(session)
        return pruned

    @contextmanager
    def session(self, host: str) -> Iterator[Session]:
        one = self.obtain_recent(host)  # clean: given back or discarded in the finally
        healthy = False
        try:
            yield one
            healthy = True
        finally:
            if healthy:
                self.relinquish(one)
            else:
                self.discard(one)
