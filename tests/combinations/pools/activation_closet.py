# take: P.shelve(n)
# give: P.unshelve(X)
# gets: value
# type: ActivationCloset
import collections

import torch


class ActivationCloset:
    """CPU homes for offloaded activations of one hidden size, found again by row count."""

    def __init__(self, hidden=4096, dtype=torch.bfloat16, keep_per_shape=4):
        self.hidden, self.dtype, self.keep = hidden, dtype, keep_per_shape
        self._kept = collections.defaultdict(collections.deque)
        self._out = {}  # id -> tensor (tensors have no usable ==)

    def shelve(self, rows):
        dq = self._kept[rows]
        t = dq.pop() if dq else torch.empty(rows, self.hidden, dtype=self.dtype)
        self._out[id(t)] = t
        return t

    def unshelve(self, t):
        del self._out[id(t)]  # KeyError: not ours, or shelved twice
        dq = self._kept[t.shape[0]]
        if len(dq) < self.keep:
            dq.append(t)

    def outstanding(self):
        return len(self._out)
