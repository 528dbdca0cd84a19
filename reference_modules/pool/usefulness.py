"""Whether keeping blocks of some size pays: the running statistics by which the pool steps aside where it
cannot win.

A block that went back to the system without ever serving a second lease was kept for nothing. Where that
happens again and again and reuse stays rare, requests of that order of size go to plain torch memory for a
while; then the pool tries again.
"""

from __future__ import annotations

from reference_modules.pool.size_classes import grid_size

TELLING = 8
"""Blocks kept for nothing before anything is concluded."""
PAYS = 4
"""Keeping pays where at least one lease was a reuse for this many blocks kept for nothing."""
PATIENCE = 64
"""Requests left to plain torch before the pool tries that size again; also where old counts are halved."""


class Usefulness:
    """Counts by grid step, small and bounded: what was long ago fades."""

    def __init__(self) -> None:
        self._reused: dict[int, int] = {}
        self._kept_for_nothing: dict[int, int] = {}
        self._aside: dict[int, int] = {}

    def reused(self, nbytes: int) -> None:
        """A block of this size served another lease."""
        if not self._kept_for_nothing:
            return
        step = grid_size(nbytes)
        if step in self._kept_for_nothing:
            self._reused[step] = min(self._reused.get(step, 0) + 1, PATIENCE)

    def never_reused(self, nbytes: int) -> None:
        """A block of this size went back to the system after its first lease."""
        step = grid_size(nbytes)
        count = self._kept_for_nothing.get(step, 0) + 1
        if count >= PATIENCE:
            count //= 2
            self._reused[step] = self._reused.get(step, 0) // 2
        self._kept_for_nothing[step] = count

    def worth_pooling(self, nbytes: int) -> bool:
        """Whether a request of this size should go through a block; a no is counted and wears off."""
        if not self._kept_for_nothing:
            return True
        step = grid_size(nbytes)
        for_nothing = self._kept_for_nothing.get(step, 0)
        if for_nothing < TELLING or self._reused.get(step, 0) * PAYS >= for_nothing:
            return True
        passed_over = self._aside.get(step, 0) + 1
        self._aside[step] = passed_over
        if passed_over < PATIENCE:
            return False
        self._aside.pop(step)
        self._kept_for_nothing[step] = TELLING // 2
        return True
