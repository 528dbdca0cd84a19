# take: P.acquire()
# give: P.release(X)
# gets: value
import torch


class Pool:
    def __init__(self, size):
        self.size = size
        self._spare = []

    def acquire(self):
        if self._spare:
            return self._spare.pop()
        return torch.empty(self.size)

    def release(self, buf):
        self._spare.append(buf)
