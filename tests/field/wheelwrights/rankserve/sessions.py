from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from .arena import ArenaSet, Region


@dataclass
class Session:
    sid: str
    region: Region
    used: int = 0
    touched: float = field(default_factory=time.monotonic)
    closed: bool = False


class SessionStore:
    def __init__(self, arenas: ArenaSet, rows: int) -> None:
        self.arenas = arenas
        self.rows = rows
        self.live: dict[str, Session] = {}
        self.archive: dict[str, torch.Tensor] = {}

    def open(self, sid: str) -> Session | None:
        if sid in self.live:
            return self.live[sid]
        region = self.arenas.place(self.rows)  # clean: owned by the session in live until close() or sweep()
        if region is None:
            return None
        s = Session(sid, region)
        self.live[sid] = s
        return s

    def resume(self, sid: str) -> Session | None:
        if sid in self.live:
            return None
        region = self.arenas.place(self.rows)  # leak: not lifted when the session is not archived
        if region is None:
            return None
        saved = self.archive.pop(sid, None)
        if saved is None:
            return None
        region.tensor[: saved.shape[0]].copy_(saved)
        s = self.live[sid] = Session(sid, region, saved.shape[0])
        return s

    def grow(self, s: Session, rows: int) -> bool:
        region = self.arenas.place(rows)  # clean: the session's, whose old region is lifted
        if region is None:
            return False
        region.tensor[: s.used].copy_(s.region.tensor[: s.used])
        old, s.region = s.region, region
        self.arenas.lift(old)
        return True

    def close(self, sid: str) -> None:
        s = self.live.pop(sid, None)
        if s is None:
            return
        s.closed = True
        self.arenas.lift(s.region)

    def sweep(self, idle: float) -> int:
        now = time.monotonic()
        stale = [s for s in self.live.values() if now - s.touched > idle]
        for s in stale:
            self.archive[s.sid] = s.region.tensor[: s.used].cpu()
            self.close(s.sid)
        return len(stale)
