# take: P.lend(n)
# give: P.settle(X)
import torch


class Pool:
    """Views of what is kept by rounded size, found again by their memory."""

    def __init__(self):
        self._by_size = {}
        self._base = {}

    def lend(self, rows):
        size = 1 << (rows - 1).bit_length()
        stack = self._by_size.setdefault(size, [])
        base = stack.pop() if stack else torch.empty(size, 64)
        out = base[:rows]
        self._base[out.data_ptr()] = base
        return out

    def settle(self, view):
        base = self._base.pop(view.data_ptr())
        self._by_size[base.shape[0]].append(base)
