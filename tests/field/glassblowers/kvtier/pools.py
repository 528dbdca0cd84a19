from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import List, Optional


@dataclass(eq=False)
class Handle:
    """A page in one of the tiers, as seen by sessions."""

    tier: str
    page: int
    owner: str
    dirty: bool = False


class PagePool:
    def __init__(self, name: str, pages: int) -> None:
        self.name = name
        self._stack: List[int] = list(range(pages))

    def take(self) -> Optional[int]:
        return self._stack.pop() if self._stack else None  # clean: returned to the caller

    def drop(self, page: int) -> None:
        self._stack.append(page)

    @property
    def spare(self) -> int:
        return len(self._stack)


class QuotaPool:
    """A PagePool whose pages are counted per owner."""

    def __init__(self, inner: PagePool, limit: int) -> None:
        self.inner = inner
        self.limit = limit
        self.held: Counter = Counter()

    def take(self, owner: str) -> Optional[int]:
        if self.held[owner] >= self.limit:
            return None
        page = self.inner.take()  # clean: returned to the caller, counted when there is one
        if page is not None:
            self.held[owner] += 1
        return page

    def drop(self, owner: str, page: int) -> None:
        self.held[owner] -= 1
        self.inner.drop(page)

    def take_pair(self, owner: str) -> Optional[tuple]:
        """K page and V page together."""
        k = self.take(owner)  # leak: not dropped when the owner's quota has room for one page only
        if k is None:
            return None
        v = self.take(owner)  # clean: returned in the pair
        if v is None:
            return None
        return k, v


class TieredPool:
    def __init__(self, hbm: QuotaPool, host: PagePool) -> None:
        self.hbm = hbm
        self.host = host

    def lease(self, owner: str, prefer_host: bool = False) -> Optional[Handle]:
        if not prefer_host:
            page = self.hbm.take(owner)  # clean: wrapped in the returned handle
            if page is not None:
                return Handle("hbm", page, owner)
        page = self.host.take()  # clean: wrapped in the returned handle
        if page is None:
            return None
        return Handle("host", page, owner)

    def end(self, handle: Handle) -> None:
        if handle.tier == "hbm":
            self.hbm.drop(handle.owner, handle.page)
        else:
            self.host.drop(handle.page)

    def lease_hbm(self, owner: str) -> Optional[Handle]:
        handle = self.lease(owner)  # leak: a handle that landed in host memory is refused without end()
        if handle is None or handle.tier != "hbm":
            return None
        return handle
