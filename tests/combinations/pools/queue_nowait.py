# take: P.checkout()
# give: P.checkin(X)
# gets: optional
import queue


class Pool:
    def __init__(self, buffers):
        self._idle = queue.LifoQueue()
        for b in buffers:
            self._idle.put_nowait(b)

    def checkout(self):
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return None

    def checkin(self, buf):
        self._idle.put_nowait(buf)
