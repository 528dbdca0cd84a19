# take: P.reserve_tokens(n)
# give: P.return_tokens(X)
# gets: optional
# type: TokenIndexStack
import torch


class TokenIndexStack:
    def __init__(self, capacity, device="cpu"):
        # slot 0 absorbs padded writes, never handed out
        self._stack = torch.arange(1, capacity + 1, dtype=torch.int64, device=device)
        self._top = capacity

    @property
    def room(self):
        return self._top

    def reserve_tokens(self, count):
        if count > self._top:
            return None
        lo = self._top - count
        picked = self._stack[lo:self._top].clone()
        self._top = lo
        return picked

    def return_tokens(self, idx):
        count = idx.numel()
        if count == 0:
            return
        assert self._top + count <= self._stack.numel(), "returned more than was taken"
        self._stack[self._top:self._top + count] = idx
        self._top += count
