"""Rows of a big embedding tensor, handed out as counted references."""
from __future__ import annotations

import threading
from typing import List, Tuple


class SlabFull(RuntimeError):
    pass


class SlabRef:
    """A span of rows.  share() adds a user, drop() takes one away."""

    __slots__ = ("_slab", "start", "rows", "users")

    def __init__(self, slab: "Slab", start: int, rows: int) -> None:
        self._slab, self.start, self.rows, self.users = slab, start, rows, 1

    def share(self) -> "SlabRef":
        with self._slab.lock:
            self.users += 1
        return self

    def drop(self) -> None:
        with self._slab.lock:
            self.users -= 1
            if self.users == 0:
                self._slab._reclaim(self.start, self.rows)


class Slab:
    def __init__(self, rows: int) -> None:
        self.lock = threading.RLock()
        self._spans: List[Tuple[int, int]] = [(0, rows)]

    def reserve(self, rows: int) -> SlabRef:
        with self.lock:
            for i, (start, length) in enumerate(self._spans):
                if length == rows:
                    self._spans.pop(i)  # clean: goes out as the SlabRef
                    return SlabRef(self, start, rows)
                if length > rows:
                    self._spans[i] = (start + rows, length - rows)
                    return SlabRef(self, start, rows)
        raise SlabFull(f"{rows} rows")

    def _reclaim(self, start: int, rows: int) -> None:
        self._spans.append((start, rows))
        self._spans.sort()
        merged: List[Tuple[int, int]] = []
        for s, n in self._spans:
            if merged and sum(merged[-1]) == s:
                s0, n0 = merged.pop()  # clean: appended again with its neighbour
                merged.append((s0, n0 + n))
            else:
                merged.append((s, n))
        self._spans = merged
