# take: P.get()
# give: P.put(X)
# gets: value
import queue


class Pool:
    def __init__(self, buffers):
        self._q = queue.Queue()
        for b in buffers:
            self._q.put(b)

    def get(self):
        return self._q.get()

    def put(self, buf):
        self._q.put(buf)
