# take: P.cut(n)
# give: P.mend(X)
# gets: value
# type: ScratchSheet
import bisect
from typing import NamedTuple


class Span(NamedTuple):
    start: int
    length: int


class ScratchSheet:
    """First-fit workspace allocator over [0, capacity), neighbours are merged on mend()."""

    ALIGN = 256

    def __init__(self, capacity):
        self.holes = [Span(0, capacity)]

    def cut(self, nbytes):
        want = -(-max(nbytes, 1) // self.ALIGN) * self.ALIGN
        for i, hole in enumerate(self.holes):
            if hole.length < want:
                continue
            if hole.length == want:
                del self.holes[i]
            else:
                self.holes[i] = Span(hole.start + want, hole.length - want)
            return Span(hole.start, want)
        raise MemoryError(f"no hole of {want} bytes in workspace")

    def mend(self, span):
        i = bisect.bisect(self.holes, span)
        self.holes.insert(i, span)
        if i + 1 < len(self.holes) and span.start + span.length == self.holes[i + 1].start:
            nxt = self.holes.pop(i + 1)
            self.holes[i] = Span(span.start, span.length + nxt.length)
        if i > 0 and self.holes[i - 1].start + self.holes[i - 1].length == span.start:
            cur = self.holes.pop(i)
            prev = self.holes[i - 1]
            self.holes[i - 1] = Span(prev.start, prev.length + cur.length)
