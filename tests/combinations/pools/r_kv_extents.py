# take: P.carve(n)
# give: P.mend(X)
# gets: optional
# type: ExtentMap
import bisect
from typing import NamedTuple


class Extent(NamedTuple):
    start: int
    length: int


class ExtentMap:
    """First-fit over parallel sorted arrays of hole starts and hole lengths."""

    def __init__(self, capacity):
        self.starts = [0]
        self.lens = [capacity]

    def carve(self, want):
        for i, have in enumerate(self.lens):
            if have < want:
                continue
            at = self.starts[i]
            if have == want:
                del self.starts[i], self.lens[i]
            else:
                self.starts[i] += want
                self.lens[i] -= want
            return Extent(at, want)
        return None

    def mend(self, ext):
        i = bisect.bisect_left(self.starts, ext.start)
        self.starts.insert(i, ext.start)
        self.lens.insert(i, ext.length)
        self._join(i)
        if i:
            self._join(i - 1)

    def _join(self, i):
        if i + 1 < len(self.starts) and self.starts[i] + self.lens[i] == self.starts[i + 1]:
            self.lens[i] += self.lens[i + 1]
            del self.starts[i + 1], self.lens[i + 1]
