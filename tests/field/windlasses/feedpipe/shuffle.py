from __future__ import annotations

import random
from typing import Iterable

from .chunks import Chunk


class ShuffleWindow:
    """Owns every chunk pushed into it until the chunk is taken out."""

    def __init__(self, width: int, seed: int = 0) -> None:
        self.width = width
        self.rng = random.Random(seed)
        self.window: list[Chunk] = []

    def push(self, chunk: Chunk) -> Chunk | None:
        """Returns the chunk that had to leave the window, if any."""
        self.window.append(chunk)
        if len(self.window) <= self.width:
            return None
        return self._swap_out()

    def _swap_out(self) -> Chunk:
        i = self.rng.randrange(len(self.window))
        self.window[i], self.window[-1] = self.window[-1], self.window[i]
        return self.window.pop()

    def take(self) -> Chunk | None:
        return self._swap_out() if self.window else None

    def clear(self) -> None:
        while self.window:
            self.window.pop().unref()

    def feed(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        left = []
        for c in chunks:
            out = self.push(c)
            if out is not None:
                left.append(out)
        return left
