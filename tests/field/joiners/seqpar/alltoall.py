from __future__ import annotations

from typing import Callable, List, Sequence

from .arena import Region
from .typed import TypedScratch


class SequenceAllToAll:
    """Swaps the split dimension of q, k and v between sequence and heads."""

    def __init__(self, scratch: TypedScratch, world: int, exchange: Callable[[Region, Region], None]):
        self.scratch = scratch
        self.world = world
        self.exchange = exchange
        self.saved: List[Region] = []

    def _shuffle(self, src: Region) -> Region:
        """A new region; src stays with the caller."""
        dst = self.scratch.take(src.size // self.scratch.itemsize)  # clean: returned
        self.exchange(src, dst)
        return dst

    def scatter_heads(self, heads: int, seq: int) -> int:
        q, k, v = self.scratch.take_qkv(heads, seq)  # leak: v is not dropped
        total = q.size + k.size + v.size
        self.scratch.drop(q)
        self.scratch.drop(k)
        return total

    def round_trip(self, data: bytes) -> bytes:
        r = self.scratch.take(len(data))  # leak: bound again to its shuffled copy
        r.view[: len(data)] = data
        r = self._shuffle(r)  # clean: dropped below
        out = bytes(r.view[: len(data)])
        self.scratch.drop(r)
        return out

    def there_and_back(self, data: bytes) -> bytes:
        src = self.scratch.take(len(data))  # clean: near miss, dropped when src is bound to the copy
        src.view[: len(data)] = data
        for _ in range(2):
            dst = self._shuffle(src)  # clean: near miss, becomes src, dropped in the next turn or after the loop
            self.scratch.drop(src)
            src = dst
        out = bytes(src.view[: len(data)])
        self.scratch.drop(src)
        return out

    def forward(self, chunks: Sequence[bytes]) -> int:
        for c in chunks:
            r = self.scratch.padded(c, 64)  # clean: None-checked, moved into saved, backward drops
            if r is None:
                continue
            self.saved.append(r)
        return len(self.saved)

    def backward(self) -> int:
        n = 0
        while self.saved:
            r = self.saved.pop()
            n += r.size
            self.scratch.drop(r)
        return n

    def step_sum(self, chunks: Sequence[bytes]) -> int:
        total = 0
        for c in chunks:
            t = self.scratch.ws.temp(max(1, len(c)))  # clean: near miss, bound again but kept in temps until end_step
            t.view[: len(c)] = c
            total += sum(t.view[: len(c)])
        self.scratch.ws.end_step()
        return total
