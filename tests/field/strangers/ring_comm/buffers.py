import torch


class RingBuffers:
    """A growing set of receive buffers of one shape."""

    def __init__(self, shape, dtype=torch.float32):
        self.shape = tuple(shape)
        self.dtype = dtype
        self._stack = []
        self.outstanding = 0

    def borrow(self):
        self.outstanding += 1
        if self._stack:
            return self._stack.pop()
        return torch.empty(self.shape, dtype=self.dtype)

    def give_back(self, buf):
        self.outstanding -= 1
        self._stack.append(buf)
