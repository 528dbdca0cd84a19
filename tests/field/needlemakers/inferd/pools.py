"""Block and logits pools. No policy in here."""
from __future__ import annotations

from typing import Optional

import torch


class BlockPool:
    def __init__(self, count: int, block: int = 16):
        self.block = block
        self._avail = list(range(count))

    def __len__(self) -> int:
        return len(self._avail)

    def lend(self, n: int) -> Optional[list[int]]:
        if n > len(self._avail):
            return None
        return [self._avail.pop() for _ in range(n)]  # clean: returned to the caller

    def lend_one(self) -> Optional[int]:
        return self._avail.pop() if self._avail else None  # clean: returned to the caller

    def repay(self, blocks: list[int]) -> None:
        self._avail.extend(blocks)


class LogitsPool:
    """Row-major logits, bucketed by power-of-two batch."""

    def __init__(self, vocab: int, device: str = "cuda"):
        self.vocab = vocab
        self.device = device
        self._cached: dict[int, list[torch.Tensor]] = {}

    def rows(self, n: int) -> torch.Tensor:
        cap = 1 << max(0, n - 1).bit_length()
        have = self._cached.setdefault(cap, [])
        if have:
            return have.pop()  # clean: returned to the caller
        return torch.empty(cap, self.vocab, device=self.device)

    def put_rows(self, t: torch.Tensor) -> None:
        self._cached.setdefault(t.shape[0], []).append(t)
