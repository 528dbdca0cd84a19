# take: P.fetch()
# give: P.stash(X)
# gets: optional
class Pool:
    def __init__(self):
        self._buffers = []

    @classmethod
    def of(cls, count, size):
        pool = cls()
        for _ in range(count):
            pool._buffers.append(bytearray(size))
        return pool

    def fetch(self):
        if not self._buffers:
            return None
        return self._buffers.pop()

    def stash(self, buf):
        self._buffers.append(buf)
