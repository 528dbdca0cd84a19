"""GPU and host page tiers behind one store."""
from enum import Enum
from typing import Optional


class Tier(Enum):
    GPU = 0
    HOST = 1


class PageArray:
    """Pages with next pointers; -1 ends the free list."""

    def __init__(self, pages: int) -> None:
        self._next = list(range(1, pages)) + [-1]
        self._first = 0

    def detach(self) -> int:
        page = self._first
        if page >= 0:
            self._first = self._next[page]
        return page

    def reattach(self, page: int) -> None:
        self._next[page] = self._first
        self._first = page


class TieredStore:
    """Names pages as (tier, page)."""

    def __init__(self, gpu_pages: int, host_pages: int) -> None:
        self.tiers = {Tier.GPU: PageArray(gpu_pages), Tier.HOST: PageArray(host_pages)}

    def obtain(self, tier: Tier) -> Optional[tuple[Tier, int]]:
        page = self.tiers[tier].detach()  # clean: near miss, a negative page means nothing detached
        if page < 0:
            return None
        return tier, page

    def obtain_any(self) -> Optional[tuple[Tier, int]]:
        return self.obtain(Tier.GPU) or self.obtain(Tier.HOST)  # clean: near miss, the second only runs after None

    def obtain_even(self, tier: Tier) -> Optional[tuple[Tier, int]]:
        """A page at an even address."""
        page = self.tiers[tier].detach()  # leak: an odd page is detached and dropped
        if page < 0 or page % 2:
            return None
        return tier, page

    def dispose(self, place: tuple[Tier, int]) -> None:
        tier, page = place
        self.tiers[tier].reattach(page)
