# take: P.fetch(100)
# give: P.stash(X)
# gets: optional
class Buf:
    def __init__(self, size):
        self.size = size
        self.data = bytearray(size)


class Pool:
    def __init__(self):
        self._bins = {s: [] for s in (64, 128, 256)}
        self.outstanding = 0

    def fetch(self, size):
        for cap in sorted(self._bins):
            if cap >= size:
                self.outstanding += 1
                return self._bins[cap].pop() if self._bins[cap] else Buf(cap)
        return None

    def stash(self, buf):
        self.outstanding -= 1
        self._bins[buf.size].append(buf)
