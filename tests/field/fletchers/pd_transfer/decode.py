from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

from .regions import PageTable, Region, RegionPool, SlotRing

logger = logging.getLogger(__name__)


@dataclass
class Incoming:
    req_id: str
    pages: List[int]
    slot: int
    first_token: Optional[int] = None


class DecodeReceiver:

    def __init__(self, table: PageTable, slots: SlotRing, pool: RegionPool, page_size: int = 16) -> None:
        self.table = table
        self.slots = slots
        self.pool = pool
        self.page_size = page_size
        self.incoming: Dict[str, Incoming] = {}
        self.draft_pages: Dict[str, List[int]] = {}
        self.landing: Dict[str, Region] = {}

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def preallocate(self, req_id: str, tokens: int) -> bool:
        if req_id in self.incoming:
            return True
        slot = self.slots.take()  # leak: abort() returns the pages only
        if slot is None:
            return False
        pages = self.table.reserve_pages(self._pages_for(tokens))  # clean: held by the Incoming, finish() and abort() return it
        if pages is None:
            self.slots.put_back(slot)
            return False
        self.incoming[req_id] = Incoming(req_id, pages, slot)
        return True

    def finish(self, req_id: str) -> None:
        inc = self.incoming.pop(req_id)
        self.table.return_pages(inc.pages)
        self.slots.put_back(inc.slot)

    def abort(self, req_id: str) -> None:
        inc = self.incoming.pop(req_id, None)
        if inc is None:
            return
        self.table.return_pages(inc.pages)
        logger.info("aborted %s", req_id)

    # -- draft model pages ---------------------------------------------

    def reserve_draft(self, req_id: str, tokens: int) -> bool:
        pages = self.table.reserve_pages(self._pages_for(tokens))  # leak: a second reservation of a request overwrites its first
        if pages is None:
            return False
        self.draft_pages[req_id] = pages
        return True

    def release_draft(self, req_id: str) -> None:
        self.table.return_pages(self.draft_pages.pop(req_id, []))

    def grow(self, req_id: str, tokens: int) -> bool:
        inc = self.incoming[req_id]
        more = self._pages_for(tokens) - len(inc.pages)
        if more <= 0:
            return True
        pages = self.table.reserve_pages(more)  # clean: joined to the request's pages
        if pages is None:
            return False
        inc.pages += pages
        return True

    def can_fit(self, tokens: int) -> bool:
        pages = self.table.reserve_pages(self._pages_for(tokens))  # clean: near miss, a probe that returns what it got
        if pages is not None:
            self.table.return_pages(pages)
        return pages is not None

    # -- landing zones -------------------------------------------------

    def land(self, req_id: str, nbytes: int) -> Region:
        region = self.landing.get(req_id)
        if region is None:
            region = self.landing[req_id] = self.pool.lease(nbytes)  # clean: kept in the landing table, taken out by consume() or drop_all()
        return region

    def consume(self, req_id: str) -> Optional[bytes]:
        region = self.landing.pop(req_id, None)
        if region is None:
            return None
        data = bytes(region.buf)
        self.pool.unlease(region)
        return data

    def drop_all(self) -> None:
        while self.landing:
            _, region = self.landing.popitem()
            self.pool.unlease(region)

    def exchange(self, req_id: str, tokens: int) -> Tuple[List[int], int]:
        pages = self.table.reserve_pages(self._pages_for(tokens)) or []  # leak: a request that is gone in the meantime drops them
        inc = self.incoming.get(req_id)
        if inc is None:
            return [], 0
        old, inc.pages = inc.pages, pages
        self.table.return_pages(old)
        return pages, len(old)
