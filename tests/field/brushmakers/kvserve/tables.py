from __future__ import annotations

import logging
from typing import Dict, List, Optional

from .pages import NoPages, PageStore

log = logging.getLogger(__name__)


class BlockTables:
    """Who owns which pages. release() is the only way out."""

    def __init__(self, store: PageStore, page_size: int) -> None:
        self.store = store
        self.page_size = page_size
        self.by_seq: Dict[str, List[int]] = {}
        self.cow: Dict[str, int] = {}

    def pages_for(self, tokens: int) -> int:
        return (tokens + self.page_size - 1) // self.page_size

    def create(self, sid: str, tokens: int) -> bool:
        if sid in self.by_seq:
            return False
        try:
            self.by_seq[sid] = self.store.several(self.pages_for(tokens))  # clean: in by_seq until release()
        except NoPages as e:
            log.debug("%s: %s", sid, e)
            return False
        return True

    def extend(self, sid: str, tokens: int) -> bool:
        table = self.by_seq.get(sid)
        if table is None:
            return False
        short = self.pages_for(tokens) - len(table)
        if short <= 0:
            return True
        more = self.store.up_to(short)  # leak: fewer pages than asked for are dropped with the answer False
        if len(more) < short:
            return False
        table.extend(more)
        return True

    def fork(self, src: str, dst: str) -> bool:
        if src not in self.by_seq or dst in self.by_seq:
            return False
        self.by_seq[dst] = [self.store.addref(p) for p in self.by_seq[src]]  # clean: near miss, release() of the fork takes the counts back
        return True

    def reserve_cow(self, sid: str) -> bool:
        if sid in self.cow:
            return True
        page = self.store.one()  # clean: near miss, in self.cow, which take_cow() or release() empties
        if page is None:
            return False
        self.cow[sid] = page
        return True

    def take_cow(self, sid: str) -> Optional[int]:
        table = self.by_seq[sid]
        page = self.cow.pop(sid, None)
        if page is None:
            return None
        old, table[-1] = table[-1], page
        self.store.unref(old)
        return page

    def release(self, sid: str) -> None:
        self.store.unref_all(self.by_seq.pop(sid, []))
        page = self.cow.pop(sid, None)
        if page is not None:
            self.store.unref(page)
