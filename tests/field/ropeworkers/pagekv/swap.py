"""Moving rows between device and host."""

from __future__ import annotations

import logging
from typing import Callable, Dict, List

from .stores import HostStore
from .table import TableSet

logger = logging.getLogger(__name__)


class Swapper:
    def __init__(self, tables: TableSet, host: HostStore, copy: Callable[[int, int], bool]):
        self.tables = tables
        self.host = host
        self.copy = copy
        self.away: Dict[str, List[int]] = {}

    def out(self, rid: str, urgent: bool) -> bool:
        row = self.tables.rows[rid]
        got: List[int] = []
        for page in row:
            h = self.host.fetch_page(urgent)  # clean: returned to the host store when short, else filed in self.away
            if h is None:
                for g in got:
                    self.host.return_page(g)
                return False
            got.append(h)
            self.copy(page, h)
        self.away[rid] = got
        self.tables.wipe(rid)
        return True

    def out_verified(self, rid: str) -> bool:
        """Like out(), with each copy checked."""
        got: List[int] = []
        for page in self.tables.rows[rid]:
            h = self.host.fetch_page()  # leak: a failed copy raises without returning the pages
            if h is None:
                break
            got.append(h)
            if not self.copy(page, h):
                raise IOError(f"page {page} of {rid} did not reach the host")
        if len(got) < len(self.tables.rows[rid]):
            for h in got:
                self.host.return_page(h)
            return False
        self.away[rid] = got
        self.tables.wipe(rid)
        return True

    def back(self, rid: str, page_tokens: int) -> bool:
        held = self.away[rid]
        if not self.tables.cover(rid, len(held) * page_tokens):
            self.tables.wipe(rid)
            return False
        for h, page in zip(held, self.tables.rows[rid]):
            self.copy(h, page)
        for h in self.away.pop(rid):
            self.host.return_page(h)
        return True

    def bounce(self, rid: str) -> bool:
        """Defragment a row through the reserve."""
        row = self.tables.rows[rid]
        tmp = self.host.borrow_reserve(len(row))  # leak: the reserve is not returned when a copy back fails
        if tmp is None:
            return False
        for page, h in zip(row, tmp):
            self.copy(page, h)
        row.sort()
        for h, page in zip(tmp, row):
            if not self.copy(h, page):
                logger.error("bounce of %s failed", rid)
                return False
        for h in tmp:
            self.host.return_page(h)
        return True

    def forget(self, rid: str) -> None:
        for h in self.away.pop(rid, ()):
            self.host.return_page(h)
