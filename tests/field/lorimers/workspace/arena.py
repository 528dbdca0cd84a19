from __future__ import annotations

import bisect
from typing import List, Tuple

import numpy as np


class Arena:
    """Slabs of raw bytes, best fit."""

    def __init__(self) -> None:
        self._slabs: List[Tuple[int, int, np.ndarray]] = []
        self.outstanding = 0

    def raw_get(self, nbytes: int) -> np.ndarray:
        self.outstanding += 1
        i = bisect.bisect_left(self._slabs, (nbytes, -1))
        if i < len(self._slabs):
            return self._slabs.pop(i)[2]
        return np.empty(nbytes, np.uint8)

    def raw_put(self, slab: np.ndarray) -> None:
        self.outstanding -= 1
        bisect.insort(self._slabs, (slab.nbytes, id(slab), slab))
