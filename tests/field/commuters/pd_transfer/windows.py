from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch


@dataclass
class Window:
    wid: int
    region: torch.Tensor
    credits: int


class TransferWindows:
    """RDMA-registered windows; the free ones form a stack, credits limit bytes in flight."""

    def __init__(self, count: int, numel: int, credits: int) -> None:
        self._stack = [Window(i, torch.empty(numel), 0) for i in range(count)]
        self._credits = credits

    def acquire_window(self, credits: int) -> Optional[Window]:
        if credits > self._credits or not self._stack:
            return None
        win = self._stack.pop()  # clean: near miss, both resources were checked before
        self._credits -= credits  # clean: noted in the window and returned with it
        win.credits = credits
        return win

    def acquire_any(self, credits: int) -> Optional[Window]:
        while credits >= 1:
            win = self.acquire_window(credits)  # clean: returned, or None and halved
            if win is not None:
                return win
            credits //= 2
        return None

    def release_window(self, win: Window) -> None:
        self._credits += win.credits
        win.credits = 0
        self._stack.append(win)
