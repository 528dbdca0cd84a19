"""Memory of the mini engine."""
from __future__ import annotations

from typing import Protocol, Sequence

import torch


class SupportsFree(Protocol):
    def free_pages(self, pages: Sequence[int]) -> None: ...


class PagePool:
    def __init__(self, n: int) -> None:
        self._stack = list(range(n))[::-1]

    def allocate_pages(self, k: int) -> list[int]:
        """Gives as many as there are, up to k."""
        out = []
        while self._stack and len(out) < k:
            out.append(self._stack.pop())  # clean: collected in the result
        return out

    def allocate_exact(self, k: int) -> list[int] | None:
        out = []
        for _ in range(k):
            if not self._stack:
                return None
            out.append(self._stack.pop())  # leak: popped pages are lost when the stack runs out midway
        return out

    def free_pages(self, pages: Sequence[int]) -> None:
        self._stack.extend(pages)


class ScratchPool:
    def __init__(self, numel: int, depth: int) -> None:
        self._idle = [torch.empty(numel) for _ in range(depth)]

    def borrow_scratch(self) -> torch.Tensor:
        return self._idle.pop()  # clean: handed to the caller

    def return_scratch(self, t: torch.Tensor) -> None:
        self._idle.append(t)
