import threading
import torch


class FlatBufferPool:
    def __init__(self, numel, n, dtype=torch.bfloat16):
        self._bufs = [torch.empty(numel, dtype=dtype) for _ in range(n)]
        self._busy = [False] * n
        self._mutex = threading.Lock()

    def checkout(self):
        self._mutex.acquire()  # leak: the full case returns None under the mutex
        for i, b in enumerate(self._busy):
            if not b:
                self._busy[i] = True
                self._mutex.release()
                return self._bufs[i]
        return None

    def checkin(self, buf):
        with self._mutex:  # clean: with releases
            for i, b in enumerate(self._bufs):
                if b.data_ptr() == buf.data_ptr():
                    self._busy[i] = False
                    return


class BufferClient:
    """Thin layer: remembers how many are out."""

    def __init__(self, pool):
        self.pool = pool
        self.out = 0

    def fetch(self):
        b = self.pool.checkout()  # clean: handed to the caller
        if b is not None:
            self.out += 1
        return b

    def hand_in(self, b):
        self.out -= 1
        self.pool.checkin(b)


class TrackedClient(BufferClient):
    def __init__(self, pool):
        super().__init__(pool)
        self.tracked = []

    def fetch(self):
        b = super().fetch()  # clean: tracked and handed to the caller
        if b is not None:
            self.tracked.append(b)
        return b

    def hand_in(self, b):
        self.tracked = [t for t in self.tracked if t is not b]
        super().hand_in(b)

    def hand_in_all(self):
        for b in list(self.tracked):
            self.hand_in(b)
