# TAKE: X, _ = self._free.popitem(last=False)
# PUT: self._free[X] = None
# EMPTY: not self._free
# COUNT: len(self._free)
# BAD: self.sizes[X] < n
from collections import OrderedDict


class Cells:
    def __init__(self, sizes):
        self.sizes = tuple(sizes)
        self._free = OrderedDict.fromkeys(range(len(sizes)))

    def take(self):
        if not self._free:
            raise RuntimeError("no cell is free")
        cell, _ = self._free.popitem(last=False)
        return cell

    def give(self, cell):
        self._free[cell] = None
