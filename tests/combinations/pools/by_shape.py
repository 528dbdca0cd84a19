# take: P.rent((4, 4))
# give: P.hand_in(X)
# gets: value
import torch


class Pool:
    def __init__(self):
        self._stacks = {}

    def rent(self, shape):
        stack = self._stacks.setdefault(shape, [])
        if stack:
            return stack.pop()
        return torch.empty(shape)

    def hand_in(self, t):
        self._stacks.setdefault(tuple(t.shape), []).append(t)
