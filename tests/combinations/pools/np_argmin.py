# take: P.enlist()
# give: P.delist(X)
# gets: optional
import numpy as np


class Pool:
    def __init__(self, rows):
        self._live = np.zeros(rows, dtype=np.int8)

    def enlist(self):
        row = int(self._live.argmin())
        if self._live[row]:
            return None
        self._live[row] = 1
        return row

    def delist(self, row):
        self._live[row] = 0
