"""Host memory for weights in transit. Two block sizes: most tensors are small."""
import threading
import time


class ArenaBusy(Exception):
    pass


class Block:
    def __init__(self, size):
        self.size = size
        self.data = bytearray(size)
        self.used = 0
        self.name = None

    def fill(self, name, data):
        self.name = name
        self.used = len(data)
        self.data[:self.used] = data

    def view(self):
        return memoryview(self.data)[:self.used]


class Arena:
    def __init__(self, small, large, small_size=1 << 20, large_size=64 << 20):
        self.small_size = small_size
        self.large_size = large_size
        self._small = [Block(small_size) for _ in range(small)]
        self._large = [Block(large_size) for _ in range(large)]
        self._cond = threading.Condition()

    def checkout(self, nbytes, timeout=10.0):
        if nbytes > self.large_size:
            raise ValueError("%d bytes are more than a block" % nbytes)
        end = time.monotonic() + timeout
        with self._cond:
            while True:
                if nbytes <= self.small_size and self._small:
                    return self._small.pop()  # clean: returned to the caller
                if self._large:
                    return self._large.pop()  # clean: returned to the caller
                if not self._cond.wait(end - time.monotonic()):
                    raise ArenaBusy(nbytes)

    def checkin(self, block):
        block.used = 0
        block.name = None
        with self._cond:
            home = self._small if block.size == self.small_size else self._large
            home.append(block)
            self._cond.notify_all()
