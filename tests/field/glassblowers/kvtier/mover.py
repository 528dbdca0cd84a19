from __future__ import annotations

import logging
from typing import Iterable, Optional

from .pools import Handle, TieredPool

logger = logging.getLogger(__name__)


class Mover:
    """Moves pages between the tiers; handles are updated in place."""

    def __init__(self, tiers: TieredPool, copier) -> None:
        self.tiers = tiers
        self.copier = copier

    def promote(self, handle: Handle) -> bool:
        if handle.tier == "hbm":
            return True
        page = self.tiers.hbm.take(handle.owner)  # clean: near miss, handed to the handle, whose host page is dropped
        if page is None:
            return False
        self.copier.up(handle.page, page)
        old, handle.page, handle.tier = handle.page, page, "hbm"
        self.tiers.host.drop(old)
        return True

    def demote(self, handle: Handle) -> bool:
        if handle.tier == "host":
            return True
        page = self.tiers.host.take()  # leak: a clean page returns early without its host page
        if page is None:
            return False
        if not handle.dirty and self.copier.has_copy(handle.page):
            return True
        self.copier.down(handle.page, page)
        old, handle.page, handle.tier = handle.page, page, "host"
        handle.dirty = False
        self.tiers.hbm.drop(handle.owner, old)
        return True

    def demote_all(self, handles: Iterable[Handle]) -> int:
        return sum(self.demote(h) for h in handles)

    def mirror(self, handle: Handle) -> Optional[Handle]:
        """A host copy of the page that lives beside the original; the caller ends it."""
        twin = self.tiers.lease(handle.owner, prefer_host=True)  # clean: ended when the copy fails, else returned
        if twin is None:
            return None
        if not self.copier.mirror(handle.page, twin.page):
            logger.warning("mirror of %s page %d failed", handle.tier, handle.page)
            self.tiers.end(twin)
            return None
        return twin
