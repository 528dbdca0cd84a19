"""Gradient buckets for a data-parallel trainer: flat buffers lent from a fixed arena of offsets."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Optional

try:
    import torch
except ImportError:
    torch = None


@dataclass
class Span:
    lo: int
    hi: int


class FlatArena:
    """Sorted hole list; neighbouring holes are merged when a span returns."""

    def __init__(self, numel: int) -> None:
        self.flat: Any = torch.zeros(numel) if torch is not None else [0.0] * numel
        self._holes: list[Span] = [Span(0, numel)]

    def carve(self, n: int) -> Optional[Span]:
        for i, hole in enumerate(self._holes):
            if hole.hi - hole.lo >= n:
                span = Span(hole.lo, hole.lo + n)
                hole.lo += n
                if hole.lo == hole.hi:
                    self._holes.pop(i)
                return span
        return None

    def uncarve(self, span: Span) -> None:
        self._holes.append(Span(span.lo, span.hi))
        self._holes.sort(key=lambda s: s.lo)
        merged: list[Span] = []
        for hole in self._holes:
            if merged and merged[-1].hi == hole.lo:
                merged[-1].hi = hole.hi
            else:
                merged.append(hole)
        self._holes = merged

    def recarve(self, span: Span, n: int) -> Optional[Span]:
        """Move to a span of another size; None leaves span untouched."""
        moved = self.carve(n)  # clean: returned, the old span goes back
        if moved is None:
            return None
        self.uncarve(span)
        return moved


@dataclass
class Bucket:
    index: int
    span: Span
    params: list[str] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)


class BucketManager:
    def __init__(self, arena: FlatArena, overlap: bool) -> None:
        self.arena = arena
        self.overlap = overlap
        self.buckets: dict[int, Bucket] = {}
        self.scratch: Optional[Span] = None

    def build(self, sizes: dict[str, int], cap: int) -> int:
        group: list[str] = []
        total = 0
        for name, n in sizes.items():
            group.append(name)
            total += n
            if total < cap:
                continue
            span = self.arena.carve(total)  # clean: near miss, the continue comes first, teardown() returns the bucket
            if span is None:
                break
            self.buckets[len(self.buckets)] = Bucket(len(self.buckets), span, group)
            group, total = [], 0
        return len(self.buckets)

    def teardown(self) -> None:
        for index in list(self.buckets):
            self.arena.uncarve(self.buckets.pop(index).span)

    def before_backward(self, n: int) -> None:
        if self.overlap:
            self.scratch = self.arena.carve(n)  # leak: after_backward() returns early when no work was launched

    def after_backward(self, launched: int) -> None:
        if not self.overlap or launched == 0:
            return
        if self.scratch is not None:
            self.arena.uncarve(self.scratch)
            self.scratch = None

    def unscale(self, grads: dict[str, list[float]], scale: float) -> int:
        skipped = 0
        for name, grad in grads.items():
            span = self.arena.carve(len(grad))  # leak: an overflowed gradient is skipped with its span
            if span is None:
                return -1
            if any(g != g for g in grad):
                skipped += 1
                continue
            for i, g in enumerate(grad):
                self.arena.flat[span.lo + i] = g / scale
            grads[name] = [float(x) for x in self.arena.flat[span.lo: span.hi]]
            self.arena.uncarve(span)
        return skipped

    def norm(self, grads: dict[str, list[float]]) -> float:
        total = 0.0
        for grad in grads.values():
            span = self.arena.carve(len(grad))  # clean: given back at the end of each round
            if span is None:
                break
            total += sum(g * g for g in grad)
            self.arena.uncarve(span)
        return total ** 0.5

    def resize(self, index: int, n: int) -> bool:
        bucket = self.buckets[index]
        moved = self.arena.recarve(bucket.span, n)  # clean: near miss, recarve gave the old span back
        if moved is None:
            return False
        bucket.span = moved
        return True


class ShardedOptimizer:
    def __init__(self, arena: FlatArena, reduce: Callable[[Span], bool]) -> None:
        self.arena = arena
        self.reduce = reduce
        self.states: dict[str, list[Optional[Span]]] = {}

    def init_state(self, name: str, n: int) -> bool:
        if name in self.states:
            return True
        moments = [self.arena.carve(n) for _ in range(2)]  # leak: the first is dropped when there is no room for the second
        if None in moments:
            return False
        self.states[name] = moments
        return True

    def drop_state(self, name: str) -> None:
        for span in self.states.pop(name, ()):
            if span is not None:
                self.arena.uncarve(span)

    def chunks(self, n: int, chunk: int) -> Iterator[Span]:
        for at in range(0, n, chunk):
            span = self.arena.carve(min(chunk, n - at))  # clean: near miss, whoever takes it from the iterator returns it
            if span is None:
                return
            yield span

    def reduce_chunks(self, n: int, chunk: int) -> int:
        done = 0
        for span in self.chunks(n, chunk):  # clean: each one goes back before the test
            ok = self.reduce(span)
            self.arena.uncarve(span)
            if not ok:
                break
            done += 1
        return done
