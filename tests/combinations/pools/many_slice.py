# take: P.alloc(4)
# give: P.free(X)
# gets: optional
class Pool:
    def __init__(self, count):
        self._free = list(range(count))

    def alloc(self, n):
        if len(self._free) < n:
            return None
        out = self._free[:n]
        del self._free[:n]
        return out

    def free(self, blocks):
        self._free.extend(blocks)
