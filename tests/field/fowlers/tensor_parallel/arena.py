"""The arena which everything is carved from, and the pools above it."""
from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Optional

import torch


@dataclass(frozen=True)
class Span:
    offset: int
    length: int


class Arena:
    """carve() takes a span off the slab, mend() puts it back."""

    def __init__(self, numel: int, device: str = "cuda") -> None:
        self.slab = torch.empty(numel, device=device)
        self._gaps: list[tuple[int, int]] = [(0, numel)]

    def carve(self, n: int) -> Optional[Span]:
        for i, (at, length) in enumerate(self._gaps):
            if length >= n:
                self._gaps[i] = (at + n, length - n)
                return Span(at, n)
        return None

    def mend(self, span: Span) -> None:
        bisect.insort(self._gaps, (span.offset, span.length))

    def view(self, span: Span, *shape: int) -> torch.Tensor:
        return self.slab[span.offset:span.offset + span.length].view(*shape)


class SpillPool:
    """Spans of one length. A few are kept at hand, the others go back to the arena."""

    def __init__(self, arena: Arena, length: int, keep: int = 4) -> None:
        self.arena, self.length, self._keep = arena, length, keep
        self._hand: list[Span] = []

    def fetch(self) -> Optional[Span]:
        if self._hand:
            return self._hand.pop()
        return self.arena.carve(self.length)  # clean: near miss, handed on, stow keeps it or mends it

    def stow(self, span: Span) -> None:
        if len(self._hand) < self._keep:
            self._hand.append(span)
        else:
            self.arena.mend(span)

    def drain(self) -> None:
        while self._hand:
            self.arena.mend(self._hand.pop())


class TrimPool:
    """Spans of one length, with a number at hand that can be set."""

    def __init__(self, arena: Arena, length: int) -> None:
        self.arena, self.length = arena, length
        self._hand: list[Span] = []

    def fill(self, count: int) -> int:
        while len(self._hand) < count:
            span = self.arena.carve(self.length)  # leak: trim cuts the list without mending what it cuts off
            if span is None:
                break
            self._hand.append(span)
        return len(self._hand)

    def trim(self, count: int) -> None:
        self._hand = self._hand[:count]

    def fetch(self) -> Optional[Span]:
        return self._hand.pop() if self._hand else None

    def stow(self, span: Span) -> None:
        self._hand.append(span)

    def close(self) -> None:
        for span in self._hand:
            self.arena.mend(span)
        self._hand.clear()


class GrowingScratch:
    """One span that grows with the wishes; always the present one is given out."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._span: Optional[Span] = None

    def at_least(self, n: int) -> torch.Tensor:
        if self._span is None or self._span.length < n:
            old = self._span
            self._span = self.arena.carve(n)  # clean: near miss, the old one is mended, the last one by close
            if old is not None:
                self.arena.mend(old)
        return self.arena.view(self._span, -1)[:n]

    def close(self) -> None:
        if self._span is not None:
            self.arena.mend(self._span)
            self._span = None


class DoublingScratch:
    """As GrowingScratch, in powers of two and keeping the contents."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._span: Optional[Span] = None

    def at_least(self, n: int) -> torch.Tensor:
        if self._span is None or self._span.length < n:
            bigger = self.arena.carve(1 << (n - 1).bit_length())  # leak: the smaller span is replaced and not mended
            if self._span is not None:
                self.arena.view(bigger, -1)[: self._span.length].copy_(self.arena.view(self._span, -1))
            self._span = bigger
        return self.arena.view(self._span, -1)[:n]

    def close(self) -> None:
        if self._span is not None:
            self.arena.mend(self._span)
            self._span = None
