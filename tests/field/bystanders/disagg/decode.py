"""Decode worker: receives KV pages and generates."""
from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional

from .pool import PageList, PagePool, alloc_or_raise, round_up

logger = logging.getLogger(__name__)


class DecodeWorker:
    def __init__(self, pool: PagePool, link: Any, model: Any, page_size: int = 16) -> None:
        self.pool = pool
        self.link = link
        self.model = model
        self.page_size = page_size
        self.pages: Dict[str, PageList] = {}

    def prealloc(self, rid: str, tokens: int) -> bool:
        if rid in self.pages:
            return True
        pages = self.pool.alloc_pages(round_up(tokens, self.page_size))  # clean: in the table until finish
        if pages is None:
            return False
        self.pages[rid] = pages
        return True

    def grow(self, rid: str, extra: int) -> bool:
        more = self.pool.alloc_pages(extra)  # clean: near miss, extended into the request's list
        if more is None:
            return False
        self.pages[rid].extend(more)
        return True

    def receive(self, rid: str, tokens: int) -> Optional[PageList]:
        pages = self.pool.alloc_pages(round_up(tokens, self.page_size))  # leak: a failed transfer is logged and the pages forgotten
        if pages is None:
            return None
        try:
            self.link.recv(rid, pages)
        except ConnectionError:
            logger.exception("transfer of %s failed", rid)
            return None
        return pages

    def receive_retry(self, rid: str, tokens: int, tries: int = 3) -> Optional[PageList]:
        for _ in range(tries):
            pages = alloc_or_raise(self.pool, round_up(tokens, self.page_size))  # clean: near miss, a failed try frees before the next
            try:
                self.link.recv(rid, pages)
            except ConnectionError:
                self.pool.free_pages(pages)
                continue
            return pages
        return None

    def accept(self, rid: str, tokens: int) -> bool:
        if rid in self.pages:
            return False
        pages = self.receive_retry(rid, tokens)  # clean: stored for finish
        if pages is None:
            return False
        self.pages[rid] = pages
        return True

    def accept_late(self, rid: str, tokens: int) -> bool:
        pages = self.receive(rid, tokens)  # leak: a request that is known already returns with the second set of pages
        if pages is None or rid in self.pages:
            return False
        self.pages[rid] = pages
        return True

    def finish(self, rid: str) -> None:
        self.pool.free_pages(self.pages.pop(rid, PageList()))

    def finish_many(self, rids: List[str]) -> None:
        for rid in rids:
            self.finish(rid)
