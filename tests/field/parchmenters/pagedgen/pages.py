from __future__ import annotations

from array import array


class PagePool:
    """Counted pages. ``take`` gives one reference on each page, ``incref`` one more."""

    def __init__(self, n: int, page_size: int):
        self.page_size = page_size
        self._count = array("l", [0]) * n
        self._stack = list(range(n))

    def __len__(self) -> int:
        return len(self._stack)

    def take(self, n: int) -> list[int] | None:
        if n > len(self._stack):
            return None
        pages = [self._stack.pop() for _ in range(n)]  # clean: returned to the caller
        for p in pages:
            self._count[p] = 1
        return pages

    def incref(self, page: int) -> int:
        self._count[page] += 1
        return page

    def decref(self, page: int) -> None:
        self._count[page] -= 1
        if not self._count[page]:
            self._stack.append(page)

    def decref_all(self, pages) -> None:
        for p in pages:
            self.decref(p)
