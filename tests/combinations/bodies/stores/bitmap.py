# TAKE: X = self._used.index(False) | self._used[X] = True
# PUT: self._used[X] = False
# EMPTY: all(self._used)
# COUNT: self._used.count(False)
# BAD: self.rows[X].isnan().any()
import torch


class Rows:
    def __init__(self, count, width):
        self._used = [False] * count
        self.rows = torch.zeros(count, width)

    def alloc(self):
        if all(self._used):
            return None
        row = self._used.index(False)
        self._used[row] = True
        return row

    def free(self, row):
        self._used[row] = False
