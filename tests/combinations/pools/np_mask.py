# take: P.pick()
# give: P.unpick(X)
# gets: optional
import numpy as np


class Pool:
    def __init__(self, rows):
        self.occupied = np.zeros(rows, dtype=bool)

    def pick(self):
        open_rows = np.flatnonzero(~self.occupied)
        if open_rows.size == 0:
            return None
        row = int(open_rows[0])
        self.occupied[row] = True
        return row

    def unpick(self, row):
        self.occupied[row] = False
