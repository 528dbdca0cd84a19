# take: P.spill(n)
# give: P.reclaim(*X)
# gets: optional
# type: SpillSectors


class SpillSectors:
    """Sectors of the NVMe offload file: `_fresh` never touched, `_dirty` seen before."""

    SECTOR = 2 * 1024 * 1024

    def __init__(self, total):
        self.total = total
        self._fresh = 0
        self._dirty = set()

    @property
    def room(self):
        return self.total - self._fresh + len(self._dirty)

    def spill(self, n):
        if n > self.room:
            return None
        out = [self._dirty.pop() for _ in range(min(n, len(self._dirty)))]
        while len(out) < n:
            out.append(self._fresh)
            self._fresh += 1
        return out

    def reclaim(self, *sectors):
        for s in sectors:
            if s in self._dirty or s >= self._fresh:
                raise KeyError(s)
            self._dirty.add(s)
        self._shrink()

    def _shrink(self):
        while self._fresh and self._fresh - 1 in self._dirty:
            self._fresh -= 1
            self._dirty.discard(self._fresh)
