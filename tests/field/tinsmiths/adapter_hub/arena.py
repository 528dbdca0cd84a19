from __future__ import annotations

from typing import List, Optional

import torch


class WeightArena:
    """Rows of a flat tensor for adapter weights. `hold` and `unhold` count the users of a row."""

    def __init__(self, rows: int, width: int) -> None:
        self.store = torch.zeros(rows, width)
        self._users = [0] * rows

    def hold(self) -> Optional[int]:
        for i, n in enumerate(self._users):
            if n == 0:
                self._users[i] = 1
                return i
        return None

    def hold_again(self, row: int) -> int:
        self._users[row] += 1
        return row

    def unhold(self, row: int) -> None:
        self._users[row] -= 1


class PairedArena:
    """Row pairs of two arenas, for the A and B halves."""

    def __init__(self, a: WeightArena, b: WeightArena) -> None:
        self.a = a
        self.b = b

    def hold(self) -> Optional[List[int]]:
        ra = self.a.hold()  # leak: not unheld when the B arena is full
        if ra is None:
            return None
        rb = self.b.hold()  # clean: returned in the pair
        if rb is None:
            return None
        return [ra, rb]

    def unhold(self, pair: List[int]) -> None:
        self.a.unhold(pair[0])
        self.b.unhold(pair[1])
