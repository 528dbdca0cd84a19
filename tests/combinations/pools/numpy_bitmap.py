# take: P.carve(n)
# give: P.mend(X)
# gets: optional
# type: BlockBitmap
import threading

import numpy as np


class BlockBitmap:
    """True = in use. Picks any n blocks, not necessarily adjacent."""

    def __init__(self, n_blocks):
        self._used = np.zeros(n_blocks, dtype=bool)
        self._mu = threading.Lock()
        self.failed = 0

    def usage(self):
        with self._mu:
            return float(self._used.mean())

    def carve(self, n):
        with self._mu:
            idle = np.flatnonzero(~self._used)
            if idle.size < n:
                self.failed += 1
                return None
            picked = idle[:n]
            self._used[picked] = True
            return picked

    def mend(self, ids):
        with self._mu:
            if not self._used[ids].all():
                raise ValueError("mending a block that is not carved")
            self._used[ids] = False
