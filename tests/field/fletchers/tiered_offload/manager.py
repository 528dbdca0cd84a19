from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Dict, List, Optional, Tuple

from .migrate import Migrator
from .tiers import Page, Tier

logger = logging.getLogger(__name__)


class OffloadManager:

    def __init__(self, hbm: Tier, host: Tier, migrator: Optional[Migrator] = None) -> None:
        self.hbm = hbm
        self.host = host
        self.migrator = migrator or Migrator()
        self.resident: "OrderedDict[str, List[Page]]" = OrderedDict()
        self.offloaded: Dict[str, List[Page]] = {}

    def admit(self, seq: str, n: int) -> bool:
        if seq in self.resident:
            return True
        if seq in self.offloaded:
            return self.fetch(seq)
        pages = self.hbm.grab_many(n)  # clean: near miss, None or held by the resident table
        while pages is None and self.offload_lru():
            pages = self.hbm.grab_many(n)  # clean: near miss, the loop only goes on while pages is None
        if pages is None:
            return False
        self.resident[seq] = pages
        return True

    def offload_lru(self) -> bool:
        if not self.resident:
            return False
        seq, pages = self.resident.popitem(last=False)
        moved = self.migrator.move_many(pages, self.hbm, self.host)  # clean: near miss, kept in the offloaded table or relinquished with the rest
        if pages:
            self.hbm.relinquish_many(pages)
            self.host.relinquish_many(moved)
            logger.info("dropped %s, host is full", seq)
            return True
        self.offloaded[seq] = moved
        return True

    def fetch(self, seq: str) -> bool:
        pages = self.offloaded.pop(seq, None)
        if pages is None:
            return False
        fresh: List[Page] = []
        while pages:
            target = self.migrator.move(pages[-1], self.host, self.hbm)  # leak: pages fetched before HBM ran out are forgotten
            if target is None:
                self.offloaded[seq] = pages
                return False
            pages.pop()
            fresh.append(target)
        self.resident[seq] = fresh[::-1]
        return True

    def release(self, seq: str) -> None:
        self.hbm.relinquish_many(self.resident.pop(seq, []))
        self.host.relinquish_many(self.offloaded.pop(seq, []))

    def zero_page(self) -> Optional[Tuple[str, int]]:
        page = self.host.grab()  # clean: relinquished before the return
        if page is None:
            return None
        page.data[:] = bytes(self.host.page_bytes)
        where = (page.tier, page.index)
        self.host.relinquish(page)
        return where
