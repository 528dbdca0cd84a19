# take: P.empty((n, 4), torch.float16)
# give: P.give(X)
# type: BlockTensors
import torch


class BlockTensors:
    """Tensors by shape, under a maker's name."""

    def __init__(self, cap=4):
        self.cap = cap
        self._idle = {}

    def empty(self, shape, dtype):
        stack = self._idle.get((tuple(shape), dtype))
        if stack:
            return stack.pop()
        return torch.empty(shape, dtype=dtype)

    def give(self, *tensors):
        for tensor in tensors:
            stack = self._idle.setdefault((tuple(tensor.shape), tensor.dtype), [])
            if len(stack) < self.cap:
                stack.append(tensor)
