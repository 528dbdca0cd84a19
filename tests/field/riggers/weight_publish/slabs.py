"""Send slabs: registered memory for the transport, few and large."""
from __future__ import annotations

from typing import Iterator

import torch


class Slab:
    __slots__ = ("mem", "fill", "seq")

    def __init__(self, nbytes: int):
        self.mem = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.fill = 0
        self.seq = -1


class SlabDepot:
    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._ready = [Slab(nbytes) for _ in range(count)]
        self._dirty: list[Slab] = []

    def draw(self) -> Slab:
        if not self._ready:
            self._scrub()
        return self._ready.pop()

    def put_down(self, slab: Slab) -> None:
        self._dirty.append(slab)

    def _scrub(self) -> None:
        while self._dirty:
            s = self._dirty.pop()
            s.fill, s.seq = 0, -1
            self._ready.append(s)

    def fill_from(self, t: torch.Tensor, start: int) -> Slab:
        """A slab with the bytes of t from `start` on."""
        slab = self.draw()  # clean: handed on
        raw = t.contiguous().view(torch.uint8).flatten()[start : start + self.nbytes]
        slab.mem[: raw.numel()].copy_(raw)
        slab.fill = raw.numel()
        return slab

    def chunks(self, t: torch.Tensor) -> Iterator[Slab]:
        """Slabs with the contents of t; each is put down by the generator when the next one is asked for."""
        total = t.numel() * t.element_size()
        for at in range(0, total, self.nbytes):
            slab = self.fill_from(t, at)  # clean: put down after the yield
            try:
                yield slab
            finally:
                self.put_down(slab)

    def chunks_owned(self, t: torch.Tensor) -> Iterator[Slab]:
        """As chunks(), but the consumer puts them down."""
        for at in range(0, t.numel() * t.element_size(), self.nbytes):
            yield self.fill_from(t, at)  # clean: the consumer owns it
