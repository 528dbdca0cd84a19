# take: P.lend()
# give: P.settle(X)
# type: KVRing
import torch


class KVRing:
    """Blocks of keys and values, whose class is called after what others number."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self.shape = shape
        self.dtype = dtype
        self._stack: list[torch.Tensor] = []

    def lend(self) -> torch.Tensor:
        if self._stack:
            return self._stack.pop()
        return torch.empty(self.shape, dtype=self.dtype)

    def settle(self, block: torch.Tensor) -> None:
        self._stack.append(block)
