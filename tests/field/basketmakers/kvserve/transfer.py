"""Moves the pages of a request from the prefill node to this one."""
from __future__ import annotations

import time
from typing import Callable, Optional

from .pages import PageId, QuotaPages
from .table import ServeRequest, TableSet, give_pages, take_pages


class Receiver:
    def __init__(self, pool: QuotaPages, tables: TableSet, read: Callable[[str, list[PageId]], bool]):
        self.pool = pool
        self.tables = tables
        self.read = read

    def pull(self, req: ServeRequest, n: int) -> bool:
        pages = take_pages(self.pool, n)  # clean: given back if the read fails, else in the live request
        if not pages:
            return False
        if not self.read(req.rid, pages):
            give_pages(self.pool, pages)
            return False
        req.pages.extend(pages)
        self.tables.live[req.rid] = req
        return True

    def pull_retry(self, req: ServeRequest, n: int, tries: int = 3) -> bool:
        for i in range(tries):
            pages = take_pages(self.pool, n)  # leak: pages of a failed read are not given back before the next try
            if pages and self.read(req.rid, pages):
                req.pages.extend(pages)
                self.tables.live[req.rid] = req
                return True
            time.sleep(0.001 * (i + 1))
        return False

    def landing(self, rid: str) -> Optional[bytes]:
        page = self.pool.allot_below(64)  # clean: yielded back in finally
        if page is None:
            return None
        try:
            return rid.encode() if self.read(rid, [page]) else None
        finally:
            self.pool.yield_back(page)
