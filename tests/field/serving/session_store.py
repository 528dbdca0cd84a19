"""Multi-turn sessions: the KV handle of a session survives between turns, bounded by an LRU."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, List, Optional

logger = logging.getLogger(__name__)


@dataclass
class KVHandle:
    hid: int
    length: int = 0
    locks: int = 0

    def lock(self) -> "KVHandle":
        self.locks += 1
        return self

    def unlock(self) -> None:
        self.locks -= 1


class HandleFactory:
    def __init__(self, n: int) -> None:
        self._ids = list(range(n))

    def create(self) -> KVHandle:
        if not self._ids:
            raise LookupError("all handles are in use")
        return KVHandle(self._ids.pop(0))

    def destroy(self, h: KVHandle) -> None:
        assert h.locks == 0, h
        self._ids.append(h.hid)


@dataclass
class Session:
    sid: str
    handle: KVHandle
    draft: Optional[KVHandle] = None
    turns: List[str] = field(default_factory=list)
    touched: float = field(default_factory=time.monotonic)

    def expired(self, ttl: float) -> bool:
        return time.monotonic() - self.touched > ttl


class SessionStore:
    def __init__(self, factory: HandleFactory, cap: int, ttl: float = 300.0) -> None:
        self.factory = factory
        self.cap = cap
        self.ttl = ttl
        self.sessions: "OrderedDict[str, Session]" = OrderedDict()
        self.on_evict: Optional[Callable[[Session], None]] = None

    def get(self, sid: str) -> Session:
        s = self.sessions.get(sid)
        if s is None:
            self._make_room()
            s = Session(sid, self.factory.create())  # clean: in the LRU, destroyed by eviction or remove
            self.sessions[sid] = s
        self.sessions.move_to_end(sid)
        s.touched = time.monotonic()
        return s

    def _make_room(self) -> None:
        while len(self.sessions) >= self.cap:
            _, old = self.sessions.popitem(last=False)
            if self.on_evict is not None:
                self.on_evict(old)
            self._destroy(old)

    def _destroy(self, s: Session) -> None:
        self.factory.destroy(s.handle)
        if s.draft is not None:
            self.factory.destroy(s.draft)
            s.draft = None

    def remove(self, sid: str) -> None:
        s = self.sessions.pop(sid, None)
        if s is not None:
            self._destroy(s)

    def sweep(self) -> int:
        gone = [sid for sid, s in self.sessions.items() if s.expired(self.ttl)]
        for sid in gone:
            self.remove(sid)
        return len(gone)

    def turn(self, sid: str, text: str) -> int:
        s = self.get(sid)
        h = s.handle.lock()  # clean: unlocked in the finally
        try:
            s.turns.append(text)
            h.length += len(text)
            return h.length
        finally:
            h.unlock()

    def turn_limited(self, sid: str, text: str, limit: int) -> Optional[int]:
        s = self.get(sid)
        h = s.handle.lock()  # leak: above the limit the lock stays
        if h.length + len(text) > limit:
            return None
        s.turns.append(text)
        h.length += len(text)
        h.unlock()
        return h.length

    def fork(self, sid: str, new_sid: str) -> Optional[Session]:
        fresh = self.factory.create()  # leak: an unknown source returns None without a destroy
        src = self.sessions.get(sid)
        if src is None:
            return None
        self.remove(new_sid)
        fresh.length = src.handle.length
        self.sessions[new_sid] = Session(new_sid, fresh, turns=list(src.turns))
        return self.sessions[new_sid]

    def fork_known(self, sid: str, new_sid: str) -> Optional[Session]:
        src = self.sessions.get(sid)
        if src is None or new_sid in self.sessions:
            return None
        fresh = self.factory.create()  # clean: near miss, all checks come before it
        fresh.length = src.handle.length
        out = self.sessions[new_sid] = Session(new_sid, fresh, turns=list(src.turns))
        return out

    def reset(self, sid: str) -> None:
        s = self.get(sid)
        old, s.handle = s.handle, self.factory.create()  # clean: near miss, the old handle is destroyed in the next line
        self.factory.destroy(old)

    def begin_draft(self, sid: str) -> None:
        s = self.get(sid)
        s.turns.append("")
        s.draft = self.factory.create()  # leak: the draft of the turn before is overwritten


class EphemeralStore(SessionStore):
    """Keeps nothing between turns, but for replay."""

    def __init__(self, factory: HandleFactory) -> None:
        super().__init__(factory, cap=1)
        self.replay: List[Session] = []

    def once(self, text: str) -> int:
        s = Session("", self.factory.create())  # clean: destroyed after the one turn
        s.turns.append(text)
        n = len(s.turns)
        self.factory.destroy(s.handle)
        return n

    def once_recorded(self, text: str) -> int:
        s = Session("", self.factory.create())  # leak: the replay list keeps only its last ten, the others are cut off
        s.turns.append(text)
        self.replay.append(s)
        self.replay = self.replay[-10:]
        return len(self.replay)

    def drop_replay(self) -> None:
        while self.replay:
            self.factory.destroy(self.replay.pop().handle)


def lock_all(sessions: List[Session]) -> List[KVHandle]:
    return [s.handle.lock() for s in sessions]  # clean: the caller gets the locked handles


def total_length(store: SessionStore) -> int:
    hs = lock_all(list(store.sessions.values()))  # clean: all are unlocked after the sum
    n = sum(h.length for h in hs)
    for h in hs:
        h.unlock()
    return n


def longest(store: SessionStore) -> Optional[str]:
    hs = lock_all(list(store.sessions.values()))  # leak: only the longest one is unlocked
    if not hs:
        return None
    best = max(hs, key=lambda h: h.length)
    best.unlock()
    return str(best.hid)
