from __future__ import annotations

import logging
from typing import List, Optional

from .tiers import Page, Tier

logger = logging.getLogger(__name__)


class Migrator:

    def __init__(self, verify: bool = False) -> None:
        self.verify = verify
        self.bytes_moved = 0

    def _copy(self, src: Page, dst: Page) -> None:
        dst.data[:] = src.data
        self.bytes_moved += len(src.data)

    def move(self, page: Page, src: Tier, dst: Tier) -> Optional[Page]:
        """Returns the page in dst; the page in src is gone after a success."""
        target = dst.grab()  # clean: returned, and the page in src is relinquished
        if target is None:
            return None
        self._copy(page, target)
        src.relinquish(page)
        return target

    def move_verified(self, page: Page, src: Tier, dst: Tier) -> Optional[Page]:
        target = dst.grab()  # leak: a mismatch returns None with the target page in hand
        if target is None:
            return None
        self._copy(page, target)
        if self.verify and target.data != page.data:
            logger.error("page %d corrupted on the way to %s", page.index, dst.name)
            return None
        src.relinquish(page)
        return target

    def move_many(self, pages: List[Page], src: Tier, dst: Tier) -> List[Page]:
        """Moves as many as fit; the rest of `pages` stays where it is."""
        out: List[Page] = []
        for page in list(pages):
            target = dst.grab()  # clean: near miss, the break leaves a None behind, the others are returned
            if target is None:
                break
            self._copy(page, target)
            pages.remove(page)
            src.relinquish(page)
            out.append(target)
        return out

    def bounce(self, page: Page, via: Tier) -> bytes:
        tmp = via.grab()  # leak: the bytes are copied out and the bounce page is dropped
        if tmp is None:
            return bytes(page.data)
        self._copy(page, tmp)
        return bytes(tmp.data)
