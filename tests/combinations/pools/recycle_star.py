# take: P.blank()
# give: P.recycle(X)
# gets: value
class Pool:
    def __init__(self, size):
        self.size = size
        self._blanks = []

    def blank(self):
        if self._blanks:
            return self._blanks.pop()
        return bytearray(self.size)

    def recycle(self, *buffers):
        self._blanks.extend(buffers)
