from __future__ import annotations

import time
from typing import Dict, List, Optional

from .migrate import Migrator
from .pages import DevicePages, PageRef


class Session:
    def __init__(self, sid: str) -> None:
        self.sid = sid
        self.refs: List[PageRef] = []
        self.touched = time.monotonic()


class SessionTable:
    def __init__(self, pages: DevicePages, mig: Migrator, cap: int) -> None:
        self.pages, self.mig, self.cap = pages, mig, cap
        self.by_id: Dict[str, Session] = {}

    def open(self, sid: str, npages: int) -> Optional[Session]:
        ref = self.pages.draw(npages)  # leak: not dropped when the table is at its cap
        if ref is None:
            return None
        s = self.by_id.get(sid)
        if s is None:
            if len(self.by_id) >= self.cap:
                return None
            s = self.by_id[sid] = Session(sid)
        s.refs.append(ref)
        return s

    def restore(self, sid: str, keys: List[str]) -> bool:
        s = self.by_id.get(sid)
        if s is None:
            return False
        for k in keys:
            ref = self.mig.claim(k)  # clean: near miss, replaced only when None, else appended to s.refs
            if ref is None:
                ref = self.mig.fetch(k)  # clean: appended to s.refs
            if ref is None:
                return False
            s.refs.append(ref)
        return True

    def branch(self, sid: str, new_sid: str) -> Optional[Session]:
        src = self.by_id.get(sid)
        if src is None or new_sid in self.by_id or len(self.by_id) >= self.cap:
            return None
        child = Session(new_sid)
        for r in src.refs:
            child.refs.append(r.retain())  # clean: owned by the child session, dropped by close()
        self.by_id[new_sid] = child
        return child

    def close(self, sid: str) -> None:
        s = self.by_id.pop(sid, None)
        if s is not None:
            for r in s.refs:
                r.drop()
