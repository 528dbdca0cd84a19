# take: P.lease(n)
# give: X.close()
# gets: optional
# type: FeatureShm
import threading


class ShmLease:
    def __init__(self, owner, start, length):
        self.owner, self.start, self.length = owner, start, length
        self._closed = False

    @property
    def view(self):
        return self.owner._mem[self.start:self.start + self.length]

    def close(self):
        if not self._closed:
            self._closed = True
            self.owner._take_back(self)


class FeatureShm:
    """Image features for the worker processes, cut in fixed chunks."""

    def __init__(self, chunk, count):
        self._chunk = chunk
        self._mem = memoryview(bytearray(chunk * count))
        self._starts = [i * chunk for i in range(count)]
        self._lock = threading.Lock()
        self.bytes_out = 0

    def lease(self, length):
        if length > self._chunk:
            raise ValueError("feature does not fit a chunk")
        with self._lock:
            if not self._starts:
                return None
            self.bytes_out += length
            return ShmLease(self, self._starts.pop(), length)

    def _take_back(self, lease):
        with self._lock:
            self.bytes_out -= lease.length
            self._starts.append(lease.start)
