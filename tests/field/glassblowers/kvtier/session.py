from __future__ import annotations

from typing import Dict, List, Optional

from .mover import Mover
from .pools import Handle, TieredPool


class Session:
    def __init__(self, sid: str, tiers: TieredPool) -> None:
        self.sid = sid
        self.tiers = tiers
        self.handles: List[Handle] = []
        self.backup: Optional[Handle] = None

    def grow(self, pages: int) -> bool:
        fresh: List[Handle] = []
        for _ in range(pages):
            handle = self.tiers.lease(self.sid)  # clean: near miss, ended on shortage, else in self.handles
            if handle is None:
                for h in fresh:
                    self.tiers.end(h)
                return False
            fresh.append(handle)
        self.handles.extend(fresh)
        return True

    def grow_hot(self) -> bool:
        handle = self.tiers.lease_hbm(self.sid)  # clean: None-checked and put in self.handles
        if handle is None:
            return False
        self.handles.append(handle)
        return True

    def shrink(self, keep: int) -> None:
        tail, self.handles = self.handles[keep:], self.handles[:keep]
        for handle in tail:
            self.tiers.end(handle)

    def back_up(self, mover: Mover) -> bool:
        """Mirror the newest page; only the latest mirror matters."""
        twin = mover.mirror(self.handles[-1])  # leak: the mirror kept from the last call is overwritten
        if twin is None:
            return False
        self.backup = twin
        return True

    def close(self) -> None:
        self.shrink(0)
        if self.backup is not None:
            self.tiers.end(self.backup)
            self.backup = None


class SessionTable:
    def __init__(self, tiers: TieredPool) -> None:
        self.tiers = tiers
        self.sessions: Dict[str, Session] = {}

    def open(self, sid: str, pages: int) -> Optional[Session]:
        session = Session(sid, self.tiers)
        if not session.grow(pages):
            return None
        self.sessions[sid] = session
        return session

    def close(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is not None:
            session.close()
