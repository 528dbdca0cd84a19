# take: P.open_grant()
# give: X.close()
# gets: value
class Grant:
    def __init__(self, pool, buf):
        self._pool = pool
        self.buf = buf
        self.done = False

    def close(self):
        if self.done:
            return
        self.done = True
        self._pool._give(self.buf)


class Pool:
    def __init__(self, bufs):
        self._bufs = list(bufs)

    def _give(self, buf):
        self._bufs.append(buf)

    def open_grant(self):
        buf = self._bufs.pop()
        return Grant(self, buf)
