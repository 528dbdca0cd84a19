"""Session affinity: exclusive and shared locks on cached conversations."""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Callable

logger = logging.getLogger(__name__)


@dataclass
class Session:
    session_id: str
    turns: list[str] = field(default_factory=list)
    mutex: threading.Lock = field(default_factory=threading.Lock)
    readers: int = 0
    dead: bool = False
    touched: float = 0.0


class SessionTable:
    """Owns the sessions. Writers lock one, readers pin it against removal."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._mu = threading.Lock()

    def ensure(self, session_id: str) -> Session:
        with self._mu:
            return self._sessions.setdefault(session_id, Session(session_id))

    def lock(self, session_id: str, blocking: bool = True) -> Session | None:
        s = self.ensure(session_id)
        if not s.mutex.acquire(blocking=blocking):  # leak: a dead session returns None with its mutex held
            return None
        if s.dead:
            return None
        s.touched = time.monotonic()
        return s

    def unlock(self, s: Session) -> None:
        s.mutex.release()

    def pin(self, session_id: str) -> Session | None:
        with self._mu:
            s = self._sessions.get(session_id)
            if s is None or s.dead:
                return None
            s.readers += 1  # clean: returned to the reader, unpin lowers it
            return s

    def unpin(self, s: Session) -> None:
        with self._mu:
            s.readers -= 1

    def remove(self, session_id: str) -> bool:
        s = self.ensure(session_id)
        if not s.mutex.acquire(blocking=False):  # clean: near miss, both ways on from here pass the release
            return False
        gone = s.readers == 0
        if gone:
            s.dead = True
            with self._mu:
                self._sessions.pop(session_id, None)
        s.mutex.release()
        return gone

    def ids(self) -> list[str]:
        with self._mu:
            return list(self._sessions)


class TurnWriter:
    """Appends turns under the lock of the session."""

    def __init__(self, table: SessionTable, max_turns: int) -> None:
        self.table = table
        self.max_turns = max_turns

    def append(self, session_id: str, text: str) -> bool:
        s = self.table.lock(session_id)  # clean: released by the finally
        if s is None:
            return False
        try:
            if len(s.turns) >= self.max_turns:
                return False
            s.turns.append(text)
            return True
        finally:
            self.table.unlock(s)

    def append_if_idle(self, session_id: str, text: str) -> bool:
        s = self.table.lock(session_id, blocking=False)  # leak: a full session returns with its lock held
        if s is None:
            return False
        if len(s.turns) >= self.max_turns:
            logger.info("session %s is full", session_id)
            return False
        s.turns.append(text)
        self.table.unlock(s)
        return True

    def move_turns(self, src_id: str, dst_id: str) -> int:
        """Move all turns over; locks in order of id."""
        first_id, second_id = sorted((src_id, dst_id))
        first = self.table.lock(first_id)  # clean: near miss, equal ids and a missing second both unlock it
        if first is None:
            return 0
        if first_id == second_id:
            self.table.unlock(first)
            return 0
        second = self.table.lock(second_id)  # clean: unlocked at the end unless None
        if second is None:
            self.table.unlock(first)
            return 0
        src, dst = (first, second) if first_id == src_id else (second, first)
        moved = len(src.turns)
        dst.turns.extend(src.turns)
        src.turns.clear()
        self.table.unlock(second)
        self.table.unlock(first)
        return moved

    def append_all(self, ids: list[str], text: str) -> int:
        held: list[Session] = []
        for sid in sorted(set(ids)):
            s = self.table.lock(sid)  # leak: one session that cannot be had leaves the earlier ones locked
            if s is None:
                return 0
            held.append(s)
        for s in held:
            s.turns.append(text)
            self.table.unlock(s)
        return len(held)

    def trim(self, keep: int, locked: Session | None = None, session_id: str = "") -> int:
        """Drop old turns. Uses the caller's lock where one is passed."""
        own = locked is None
        s = self.table.lock(session_id) if own else locked  # clean: near miss, the flag tells whether it is ours to unlock
        if s is None:
            return 0
        dropped = max(0, len(s.turns) - keep)
        del s.turns[:dropped]
        if own:
            self.table.unlock(s)
        return dropped


class Summariser:
    """Condenses the oldest turns of pinned sessions."""

    def __init__(self, table: SessionTable, model: Callable[[list[str]], str]) -> None:
        self.table = table
        self.model = model
        self._pinned: dict[str, Session] = {}

    def collect(self, min_turns: int) -> list[str]:
        """Pin all sessions that are long enough."""
        for sid in self.table.ids():
            if sid in self._pinned:
                continue
            s = self.table.pin(sid)  # leak: short sessions are skipped while pinned
            if s is None or len(s.turns) < min_turns:
                continue
            self._pinned[sid] = s
        return sorted(self._pinned)

    def collect_one(self, sid: str, min_turns: int) -> bool:
        if sid in self._pinned:
            return True
        s = self.table.pin(sid)  # clean: near miss, a short session is unpinned at once
        if s is None:
            return False
        if len(s.turns) < min_turns:
            self.table.unpin(s)
            return False
        self._pinned[sid] = s
        return True

    def run(self) -> dict[str, str]:
        out: dict[str, str] = {}
        while self._pinned:
            sid, s = self._pinned.popitem()
            try:
                out[sid] = self.model(s.turns)
            finally:
                self.table.unpin(s)
        return out
