import torch


class TensorArena:
    """Tensors of power-of-two sizes."""

    def __init__(self):
        self._by_size = {}
        self.balance = 0

    def fetch(self, numel):
        size = 1 << max(numel - 1, 0).bit_length()
        self.balance += 1
        stack = self._by_size.setdefault(size, [])
        return stack.pop() if stack else torch.empty(size)

    def retire(self, tensor):
        self.balance -= 1
        self._by_size.setdefault(tensor.numel(), []).append(tensor)
