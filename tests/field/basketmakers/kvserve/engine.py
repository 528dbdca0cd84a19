"""Engine steps over the page tables."""
from __future__ import annotations

import logging
from collections import deque

from .pages import QuotaPages
from .table import ServeRequest, TableSet, give_pages, take_pages

log = logging.getLogger(__name__)


class Engine:
    def __init__(self, pool: QuotaPages, page_size: int = 16):
        self.pool = pool
        self.page_size = page_size
        self.tables = TableSet(pool)
        self.pending: deque[ServeRequest] = deque()

    def pages_for(self, req: ServeRequest) -> int:
        return max(1, -(-len(req.prompt) // self.page_size))

    def prefill(self) -> int:
        started = 0
        while self.pending:
            req = self.pending.popleft()
            pages = take_pages(self.pool, self.pages_for(req))  # leak: a cancelled request goes on to the next with its pages taken
            if not pages:
                self.pending.appendleft(req)
                break
            if req.cancelled:
                continue
            req.pages.extend(pages)
            self.tables.live[req.rid] = req
            started += 1
        return started

    def cancel(self, rid: str) -> None:
        req = self.tables.live.get(rid)
        if req is not None:
            req.cancelled = True
            self.tables.remove(rid)
            return
        for waiting in self.pending:
            if waiting.rid == rid:
                waiting.cancelled = True

    def can_fit(self, req: ServeRequest) -> bool:
        trial = take_pages(self.pool, self.pages_for(req))  # clean: given back before the answer
        fits = bool(trial)
        give_pages(self.pool, trial)
        return fits

    def grow(self, rid: str) -> bool:
        req = self.tables.live[rid]
        page = self.pool.allot()  # clean: appended to the live request
        if page is None:
            return False
        req.pages.append(page)
        return True

    def beam(self, rid: str, width: int) -> list[ServeRequest]:
        base = self.tables.live[rid]
        out: list[ServeRequest] = []
        for i in range(width):
            pages = take_pages(self.pool, len(base.pages))  # leak: the children made so far are dropped when one cannot be had
            if not pages:
                log.info("beam %d of %s refused", i, rid)
                return []
            out.append(ServeRequest(f"{rid}.{i}", base.prompt, pages))
        for child in out:
            self.tables.live[child.rid] = child
        return out
