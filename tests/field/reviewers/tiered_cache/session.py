"""Requests which load pages back from the host tier."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from .controller import TierController


@dataclass
class Session:
    sid: str
    node_ids: list[int]
    pages: torch.Tensor | None = None
    tail: torch.Tensor | None = None


class SessionManager:
    def __init__(self, ctl: TierController):
        self.ctl = ctl
        self.sessions: dict[str, Session] = {}

    def open(self, s: Session) -> bool:
        if s.sid in self.sessions:
            return False
        s.pages = self.ctl.load_chain(s.node_ids)  # clean: near miss, refilled here when the tail is missing and by close()
        if s.pages is None:
            return False
        s.tail = self.ctl.device.carve(1)  # clean: refilled by close()
        if s.tail is None:
            self.ctl.device.refill(s.pages)
            s.pages = None
            return False
        self.sessions[s.sid] = s
        return True

    def reopen(self, s: Session) -> bool:
        s.pages = self.ctl.load_chain(s.node_ids)  # leak: the pages which an open session holds are overwritten
        if s.pages is None:
            return False
        self.sessions[s.sid] = s
        return True

    def extend(self, s: Session) -> bool:
        if self.sessions.get(s.sid) is not s:
            return False
        more = self.ctl.device.carve(1)  # clean: near miss, joined to the session's pages which close() refills
        if more is None:
            return False
        s.pages = more if s.pages is None else torch.cat([s.pages, more])
        return True

    def preview(self, node_id: int) -> torch.Tensor | None:
        pages = self.ctl.load(node_id)  # leak: indexing copies the rows, the page numbers are dropped
        if pages is None:
            return None
        return self.ctl.device.store[pages]

    def norm(self, node_id: int) -> float:
        pages = self.ctl.load(node_id)  # clean: refilled before the return
        if pages is None:
            return 0.0
        value = float(self.ctl.device.store[pages].norm())
        self.ctl.device.refill(pages)
        return value

    def close(self, sid: str) -> None:
        s = self.sessions.pop(sid, None)
        if s is None:
            return
        for pages in (s.pages, s.tail):
            if pages is not None:
                self.ctl.device.refill(pages)
        s.pages = s.tail = None
