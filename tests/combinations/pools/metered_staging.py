# take: P.obtain()
# give: P.relinquish(X)
# gets: value
# type: MeteredStaging
import threading
import time


class StagingBuffers:
    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.idle = []

    def pull(self):
        return self.idle.pop() if self.idle else bytearray(self.nbytes)

    def push(self, buf):
        self.idle.append(buf)


class MeteredStaging:
    """Thread-safe shell around StagingBuffers which also keeps hold times."""

    def __init__(self, nbytes):
        self._inner = StagingBuffers(nbytes)
        self._lock = threading.Lock()
        self._since = {}
        self.longest_hold = 0.0

    def obtain(self):
        with self._lock:
            buf = self._inner.pull()
            self._since[id(buf)] = time.perf_counter()
        return buf

    def relinquish(self, buf):
        with self._lock:
            held = time.perf_counter() - self._since.pop(id(buf))
            self.longest_hold = max(self.longest_hold, held)
            self._inner.push(buf)
