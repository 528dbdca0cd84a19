from __future__ import annotations

import time
from typing import Any, Dict, List, Optional

from .handoff import Handoff
from .pages import Ledger, TenantView


class DecodeWorker:
    def __init__(self, view: TenantView, link: Any) -> None:
        self.view = view
        self.link = link
        self.ledger = Ledger()
        self.parked: Dict[str, List[int]] = {}

    def accept(self, h: Handoff) -> bool:
        pages = self.view.draw(len(h.pages))  # leak: not refilled when the link fails to copy
        if pages is None:
            return False
        if not self.link.copy(h.rid, h.pages, pages):
            return False
        self.ledger.enter(h.rid, pages)
        return True

    def accept_retry(self, h: Handoff, tries: int = 3) -> bool:
        pages: Optional[List[int]] = None
        for _ in range(tries):
            pages = self.view.draw(len(h.pages))  # clean: near miss, the loop draws again only after a None
            if pages is not None:
                break
            time.sleep(0.01)
        if pages is None:
            return False
        self.ledger.enter(h.rid, pages)
        self.link.copy(h.rid, h.pages, pages)
        return True

    def grow(self, rid: str) -> bool:
        one = self.view.draw(1)  # leak: lost when the request has left the ledger
        if one is None:
            return False
        if rid not in self.ledger:
            return False
        self.ledger.enter(rid, one)
        return True

    def park(self, rid: str, n: int) -> None:
        if rid in self.parked:
            return
        pages = self.view.draw_soft(n)  # leak: unpark() of an aborted request throws the parked pages away
        if pages is not None:
            self.parked[rid] = pages

    def unpark(self, rid: str, aborted: bool) -> None:
        pages = self.parked.pop(rid, None)
        if pages is None or aborted:
            return
        self.ledger.enter(rid, pages)

    def finish(self, rid: str) -> None:
        self.view.refill(self.ledger.strike(rid))
