"""KV of finished turns, kept for the next turn of the conversation."""
from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional


class PageBank:
    def __init__(self, pages: int) -> None:
        self._pages = list(range(pages))

    def withdraw(self, n: int) -> Optional[List[int]]:
        if n > len(self._pages):
            return None
        got = self._pages[-n:] if n else []
        del self._pages[len(self._pages) - n:]
        return got

    def deposit(self, pages: List[int]) -> None:
        self._pages.extend(pages)

    def __len__(self) -> int:
        return len(self._pages)


@dataclass(eq=False)
class Session:
    sid: str
    pages: List[int] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    last: float = field(default_factory=time.monotonic)
    draft_pages: List[int] = field(default_factory=list)


class SessionStore:
    """Sessions are counted while a turn is running, idle ones expire."""

    def __init__(self, bank: PageBank, ttl: float = 600.0) -> None:
        self.bank = bank
        self.ttl = ttl
        self._sessions: Dict[str, Session] = {}

    def attach(self, sid: str) -> Session:
        s = self._sessions.get(sid)
        if s is None:
            s = self._sessions[sid] = Session(sid)
        s.users += 1
        s.last = time.monotonic()
        return s

    def detach(self, s: Session) -> None:
        s.users -= 1
        s.last = time.monotonic()

    def find(self, sid: str) -> Optional[Session]:
        """Without counting: for those who only look."""
        return self._sessions.get(sid)

    def grow(self, s: Session, n: int) -> bool:
        more = self.bank.withdraw(n)  # clean: in s.pages, deposited by expire and erase
        if more is None:
            return False
        s.pages.extend(more)
        return True

    def grow_draft(self, s: Session, n: int) -> bool:
        more = self.bank.withdraw(n)  # leak: expire and erase deposit s.pages, nobody deposits draft_pages
        if more is None:
            return False
        s.draft_pages.extend(more)
        return True

    def shrink(self, s: Session, keep: int) -> int:
        cut, s.pages = s.pages[keep:], s.pages[:keep]
        self.bank.deposit(cut)
        return len(cut)

    def expire(self) -> int:
        now = time.monotonic()
        idle = [s for s in self._sessions.values() if s.users == 0 and now - s.last > self.ttl]
        for s in idle:
            del self._sessions[s.sid]
            self.bank.deposit(s.pages)
            s.pages = []
        return len(idle)

    def erase(self, sid: str) -> bool:
        s = self._sessions.pop(sid, None)
        if s is None:
            return False
        self.bank.deposit(s.pages)
        s.pages = []
        s.draft_pages = []
        return True
