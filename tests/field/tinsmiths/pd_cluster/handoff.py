"""What goes from prefill to decode."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Optional


@dataclass
class Handoff:
    rid: str
    first_token: int
    pages: List[int]
    meta: dict = field(default_factory=dict)


class Outbox:
    """Handoffs that wait for a decode worker's acknowledgement."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self._wait: dict = {}

    def add(self, h: Handoff) -> None:
        self._wait[h.rid] = h

    def ack(self, rid: str) -> None:
        h = self._wait.pop(rid, None)
        if h is not None:
            self.view.refill(h.pages)

    def expire(self, rids: List[str]) -> int:
        n = 0
        for rid in rids:
            if rid in self._wait:
                self.ack(rid)
                n += 1
        return n

    def get(self, rid: str) -> Optional[Handoff]:
        return self._wait.get(rid)
