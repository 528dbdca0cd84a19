"""Device pages. Each worker has one PagePool, wrapped by a TenantView for each tenant."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional


class PagePool:
    def __init__(self, count: int) -> None:
        self._ids = list(range(count))
        self._lock = threading.Lock()

    def draw(self, n: int) -> Optional[List[int]]:
        with self._lock:
            if len(self._ids) < n:
                return None
            taken, self._ids = self._ids[:n], self._ids[n:]
            return taken

    def refill(self, pages: List[int]) -> None:
        with self._lock:
            self._ids.extend(pages)


class TenantView:
    """A pool with a cap for one tenant."""

    def __init__(self, pool: PagePool, cap: int) -> None:
        self.pool = pool
        self.cap = cap
        self.out = 0

    def draw(self, n: int) -> Optional[List[int]]:
        pages = self.pool.draw(n)  # leak: not refilled when the tenant is over its cap
        if pages is None:
            return None
        if self.out + n > self.cap:
            return None
        self.out += n
        return pages

    def draw_soft(self, n: int) -> Optional[List[int]]:
        """May go over the cap by a tenth."""
        if self.out + n > self.cap + self.cap // 10:
            return None
        pages = self.pool.draw(n)  # clean: near miss, the cap is checked before, what is drawn is returned
        if pages is not None:
            self.out += n
        return pages

    def refill(self, pages: List[int]) -> None:
        self.out -= len(pages)
        self.pool.refill(pages)


class Ledger:
    """Pages by request id."""

    def __init__(self) -> None:
        self._rows: Dict[str, List[int]] = {}

    def enter(self, rid: str, pages: List[int]) -> None:
        self._rows.setdefault(rid, []).extend(pages)

    def strike(self, rid: str) -> List[int]:
        return self._rows.pop(rid, [])

    def __contains__(self, rid: str) -> bool:
        return rid in self._rows
