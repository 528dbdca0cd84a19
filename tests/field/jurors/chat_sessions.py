"""Chat sessions that keep their KV pages pinned between turns."""
from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Optional


class PageStore:
    def __init__(self) -> None:
        self._pins: Counter[int] = Counter()
        self._known: set[int] = set()

    def add(self, page: int) -> None:
        self._known.add(page)

    def pin(self, page: int) -> bool:
        if page not in self._known:
            return False
        self._pins[page] += 1
        return True

    def unpin(self, page: int) -> None:
        self._pins[page] -= 1
        if self._pins[page] <= 0:
            del self._pins[page]


class RWLock:
    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._readers = 0
        self._writer = False

    def acquire_read(self) -> None:
        with self._cond:
            self._cond.wait_for(lambda: not self._writer)
            self._readers += 1

    def release_read(self) -> None:
        with self._cond:
            self._readers -= 1
            self._cond.notify_all()

    def acquire_write(self, timeout: Optional[float] = None) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: not self._writer and self._readers == 0, timeout):
                return False
            self._writer = True
            return True

    def release_write(self) -> None:
        with self._cond:
            self._writer = False
            self._cond.notify_all()


@dataclass(eq=False)
class Session:
    sid: str
    lane: int
    touched: float = 0.0
    pages: list[int] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)


class LaneTable:
    def __init__(self, lanes: int) -> None:
        self._free = list(range(lanes))

    def open(self, sid: str) -> Optional[Session]:
        if not self._free:
            return None
        return Session(sid, self._free.pop(), time.monotonic())

    def close(self, session: Session) -> None:
        self._free.append(session.lane)
        session.lane = -1


class SessionService:
    def __init__(self, lanes: LaneTable, pages: PageStore, ttl: float = 600.0) -> None:
        self.lanes = lanes
        self.pages = pages
        self.ttl = ttl
        self.lock = RWLock()
        self.by_id: dict[str, Session] = {}

    def get_or_open(self, sid: str) -> Optional[Session]:
        session = self.by_id.get(sid)
        if session is None:
            session = self.lanes.open(sid)  # clean: near miss, only opened for a new sid, stored in by_id and closed by drop() or sweep()
            if session is None:
                return None
            self.by_id[sid] = session
        session.touched = time.monotonic()
        return session

    def restart(self, sid: str) -> bool:
        session = self.lanes.open(sid)  # leak: overwrites the live session of this sid, whose lane is never closed
        if session is None:
            return False
        self.by_id[sid] = session
        return True

    def history(self, sid: str) -> list[str]:
        self.lock.acquire_read()  # leak: an unknown session returns [] with the read side still held
        session = self.by_id.get(sid)
        if session is None:
            return []
        turns = list(session.turns)
        self.lock.release_read()
        return turns

    def summary(self, sid: str) -> str:
        self.lock.acquire_read()  # clean: near miss, released before either return
        session = self.by_id.get(sid)
        text = "" if session is None else "\n".join(session.turns[-4:])
        self.lock.release_read()
        if not text:
            return "(empty)"
        return text

    def append(self, sid: str, turn: str) -> bool:
        if not self.lock.acquire_write(timeout=1.0):  # clean: near miss, False means not held, and finally releases otherwise
            return False
        try:
            session = self.by_id.get(sid)
            if session is None:
                return False
            session.turns.append(turn)
            return True
        finally:
            self.lock.release_write()

    def compact(self, sid: str, limit: int) -> None:
        self.lock.acquire_read()  # clean: near miss, released before the change to the write side
        session = self.by_id.get(sid)
        too_long = session is not None and len(session.turns) > limit
        self.lock.release_read()
        if not too_long or session is None:
            return
        if self.lock.acquire_write():  # clean: released at the end
            session.turns = session.turns[-limit:]
            self.lock.release_write()

    def attach(self, session: Session, pages: list[int]) -> int:
        attached = 0
        for page in pages:
            if not self.pages.pin(page):  # leak: clear() empties the session's page list without unpinning
                continue
            session.pages.append(page)
            attached += 1
        return attached

    def clear(self, session: Session) -> None:
        session.pages = []
        session.turns.clear()

    def drop(self, sid: str) -> None:
        session = self.by_id.pop(sid, None)
        if session is None:
            return
        for page in session.pages:
            self.pages.unpin(page)
        self.lanes.close(session)

    @contextmanager
    def pinned(self, pages: list[int]) -> Iterator[list[int]]:
        held = [p for p in pages if self.pages.pin(p)]  # clean: near miss, only pinned pages get into held, unpinned in finally
        try:
            yield held
        finally:
            for page in held:
                self.pages.unpin(page)

    def replay(self, pages: list[int], fn: Callable[[int], bool]) -> int:
        done = 0
        for page in pages:
            if not self.pages.pin(page):  # leak: break on the first refused page leaves that page pinned
                continue
            if not fn(page):
                break
            self.pages.unpin(page)
            done += 1
        return done

    def touch_all(self, pages: list[int], fn: Callable[[int], bool]) -> int:
        with self.pinned(pages) as held:  # clean: the context manager unpins
            return sum(1 for page in held if fn(page))

    def one_shot(self, prompt: str, run: Callable[[Session, str], str], session: Optional[Session] = None) -> Optional[str]:
        owned = session is None
        if session is None:
            session = self.lanes.open("one-shot")  # clean: near miss, the owned flag closes exactly the session opened here
            if session is None:
                return None
        try:
            return run(session, prompt)
        finally:
            if owned:
                self.lanes.close(session)

    def sweep(self) -> int:
        now = time.monotonic()
        stale = [sid for sid, s in self.by_id.items() if now - s.touched > self.ttl]
        for sid in stale:
            self.drop(sid)
        return len(stale)
