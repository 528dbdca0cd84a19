# take: P.place(n)
# give: P.vacate(X)
# gets: optional
# type: ExtentMap
import bisect


class ExtentMap:
    """First-fit over sorted (offset, length) holes; neighbours are coalesced."""

    def __init__(self, total):
        self._holes = [(0, total)]
        self._placed = {}

    def place(self, length):
        for i, (off, room) in enumerate(self._holes):
            if room >= length:
                if room == length:
                    del self._holes[i]
                else:
                    self._holes[i] = (off + length, room - length)
                self._placed[off] = length
                return off
        return None

    def vacate(self, off):
        length = self._placed.pop(off)
        i = bisect.bisect_left(self._holes, (off, 0))
        if i < len(self._holes) and self._holes[i][0] == off + length:
            length += self._holes.pop(i)[1]
        if i and sum(self._holes[i - 1]) == off:
            prev_off, prev_len = self._holes.pop(i - 1)
            off, length = prev_off, prev_len + length
            i -= 1
        self._holes.insert(i, (off, length))
