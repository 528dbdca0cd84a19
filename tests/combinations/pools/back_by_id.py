# take: P.next_buffer()
# give: P.finished(X.id)
# gets: optional
class Buffer:
    def __init__(self, number):
        self.id = number
        self.data = bytearray(64)


class Pool:
    def __init__(self, count):
        self._idle = [Buffer(i) for i in range(count)]
        self._lent = {}

    def next_buffer(self):
        if not self._idle:
            return None
        buffer = self._idle.pop()
        self._lent[buffer.id] = buffer
        return buffer

    def finished(self, number):
        self._idle.append(self._lent.pop(number))
