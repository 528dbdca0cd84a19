# take: P.pop(n)
# give: P.push(X)
# gets: value
# type: TokenSlotStack
import torch
from torch import Tensor


class TokenSlotStack:
    """KV token slots on a preallocated int64 stack, no reallocation on either side."""

    def __init__(self, n_slots: int, device: str = "cpu"):
        self.stack = torch.arange(n_slots, dtype=torch.int64, device=device)
        self.top = n_slots

    def pop(self, count: int) -> Tensor:
        lo = self.top - count
        if lo < 0:
            raise RuntimeError(f"KV cache exhausted: need {count}, have {self.top}")
        self.top = lo
        return self.stack[lo:lo + count].clone()

    def push(self, slots: Tensor) -> None:
        hi = self.top + slots.numel()
        if hi > self.stack.numel():
            raise RuntimeError("more slots pushed than exist")
        self.stack[self.top:hi] = slots
        self.top = hi
