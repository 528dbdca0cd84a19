"""Locks per session key for stateful decoding."""
from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Callable, Iterator, Optional


class KeyedMutex:
    """One lock per key, dropped once nobody wants it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._wanted: dict[str, int] = {}

    def enter(self, key: str) -> None:
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
            self._wanted[key] = self._wanted.get(key, 0) + 1
        lock.acquire()  # clean: held for the caller, leave releases it

    def try_enter(self, key: str) -> bool:
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
            if not lock.acquire(blocking=False):  # clean: near miss, returns False only when it was not taken
                return False
            self._wanted[key] = self._wanted.get(key, 0) + 1
            return True

    def leave(self, key: str) -> None:
        with self._guard:
            self._locks[key].release()
            self._wanted[key] -= 1
            if self._wanted[key] == 0:
                del self._wanted[key], self._locks[key]

    @contextlib.contextmanager
    def inside(self, key: str) -> Iterator[None]:
        self.enter(key)  # clean: finally leaves
        try:
            yield
        finally:
            self.leave(key)


@dataclass
class Session:
    key: str
    tokens: list[int] = field(default_factory=list)
    closed: bool = False


class SessionStore:
    """Sessions are touched only inside their key."""

    def __init__(self, mutex: KeyedMutex) -> None:
        self.mutex = mutex
        self.sessions: dict[str, Session] = {}

    def append(self, key: str, tokens: list[int]) -> bool:
        self.mutex.enter(key)  # leak: a closed session returns while inside
        session = self.sessions.get(key)
        if session is None or session.closed:
            return False
        session.tokens.extend(tokens)
        self.mutex.leave(key)
        return True

    def length(self, key: str) -> int:
        self.mutex.enter(key)  # clean: near miss, returns lie in try with finally
        try:
            session = self.sessions.get(key)
            if session is None:
                return 0
            return len(session.tokens)
        finally:
            self.mutex.leave(key)

    def truncate(self, key: str, size: int) -> None:
        with self.mutex.inside(key):  # clean: context manager leaves
            session = self.sessions.get(key)
            if session is not None:
                del session.tokens[size:]

    def sweep(self, keys: list[str]) -> int:
        removed = 0
        for key in keys:
            if not self.mutex.try_enter(key):  # leak: open sessions continue while inside
                continue
            session = self.sessions.get(key)
            if session is not None and not session.closed:
                continue
            self.sessions.pop(key, None)
            removed += 1
            self.mutex.leave(key)
        return removed

    def sweep_one(self, keys: list[str]) -> Optional[str]:
        for key in keys:
            if not self.mutex.try_enter(key):  # clean: near miss, left before the test that returns
                continue
            session = self.sessions.get(key)
            dead = session is None or session.closed
            if dead:
                self.sessions.pop(key, None)
            self.mutex.leave(key)
            if dead:
                return key
        return None

    def merge(self, into: str, other: str) -> bool:
        first, second = sorted((into, other))
        self.mutex.enter(first)  # leak: not left when the second key is busy
        if not self.mutex.try_enter(second):  # clean: left at the end
            return False
        source = self.sessions.pop(other, None)
        if source is not None and into in self.sessions:
            self.sessions[into].tokens.extend(source.tokens)
        self.mutex.leave(second)
        self.mutex.leave(first)
        return True

    def swap(self, left: str, right: str) -> bool:
        if left == right:
            return True
        self.mutex.enter(min(left, right))  # clean: near miss, left too when the other is busy
        if not self.mutex.try_enter(max(left, right)):  # clean: left in the finally
            self.mutex.leave(min(left, right))
            return False
        try:
            a, b = self.sessions.get(left), self.sessions.get(right)
            if a is not None and b is not None:
                a.tokens, b.tokens = b.tokens, a.tokens
            return True
        finally:
            self.mutex.leave(max(left, right))
            self.mutex.leave(min(left, right))

    def rename(self, key: str, suffix: str) -> None:
        self.mutex.enter(key)  # leak: key is rebound, so leave opens another lock
        session = self.sessions.pop(key, None)
        key = key + suffix
        if session is not None:
            session.key = key
            self.sessions[key] = session
        self.mutex.leave(key)

    def with_session(self, key: str, fn: Callable[[Session], int], wait: bool) -> Optional[int]:
        if wait:
            self.mutex.enter(key)  # clean: near miss, both arms reach the same leave
        elif not self.mutex.try_enter(key):  # clean: left below
            return None
        session = self.sessions.setdefault(key, Session(key))
        result = None if session.closed else fn(session)
        self.mutex.leave(key)
        return result
