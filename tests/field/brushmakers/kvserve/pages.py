from __future__ import annotations

import threading
from typing import List, Optional, Tuple


class NoPages(Exception):
    def __init__(self, want: int, have: int) -> None:
        super().__init__(f"want {want} pages, have {have}")
        self.want = want
        self.have = have


class PageStore:
    """Page numbers on a stack, with an array of reference counts."""

    def __init__(self, n: int) -> None:
        self._stack = list(range(n - 1, -1, -1))
        self._refs = [0] * n
        self._mu = threading.RLock()

    @property
    def spare(self) -> int:
        return len(self._stack)

    def one(self) -> Optional[int]:
        with self._mu:
            if not self._stack:
                return None
            p = self._stack.pop()  # clean: returned to the caller
            self._refs[p] = 1
            return p

    def several(self, n: int) -> List[int]:
        """All n, or NoPages and none."""
        with self._mu:
            if n > len(self._stack):
                raise NoPages(n, len(self._stack))
            return [self.one() for _ in range(n)]  # clean: near miss, the count was checked under the lock, all are returned

    def up_to(self, n: int) -> List[int]:
        got: List[int] = []
        while len(got) < n:
            p = self.one()  # clean: collected in the list that is returned
            if p is None:
                break
            got.append(p)
        return got

    def aligned(self, align: int) -> Optional[int]:
        for _ in range(align):
            p = self.one()  # leak: pages off the alignment are taken and not put back
            if p is None:
                return None
            if p % align == 0:
                return p
        return None

    def addref(self, p: int) -> int:
        with self._mu:
            self._refs[p] += 1
        return p

    def unref(self, p: int) -> None:
        with self._mu:
            self._refs[p] -= 1
            if self._refs[p] == 0:
                self._stack.append(p)

    def unref_all(self, pages: List[int]) -> None:
        for p in pages:
            self.unref(p)

    def split(self, n: int) -> Tuple[List[int], List[int]]:
        half = n // 2
        lo = self.several(half)  # leak: the second call's NoPages loses the first half
        hi = self.several(n - half)  # clean: returned to the caller
        return lo, hi
