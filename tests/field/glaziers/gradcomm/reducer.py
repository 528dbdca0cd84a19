from __future__ import annotations

from typing import Callable, Iterator, Optional

import numpy as np

from .arena import CommArena, FlatBuffer

AllReduce = Callable[[np.ndarray], bool]


class GradBucket:
    def __init__(self, names: list[str], numel: int) -> None:
        self.names = names
        self.numel = numel
        self.buf: Optional[FlatBuffer] = None
        self.residual: Optional[FlatBuffer] = None


class Reducer:
    def __init__(self, arena: CommArena, all_reduce: AllReduce, buckets: list[GradBucket]) -> None:
        self.arena = arena
        self.all_reduce = all_reduce
        self.buckets = buckets

    def begin(self) -> bool:
        for b in self.buckets:
            if b.buf is not None:
                continue
            b.buf = self.arena.request_zeroed(b.numel)  # clean: near miss, buckets that have one are skipped, end relinquishes
            if b.buf is None:
                self.end()
                return False
        return True

    def enable_error_feedback(self) -> None:
        for b in self.buckets:
            b.residual = self.arena.request_zeroed(b.numel)  # leak: end relinquishes the bucket's buf but no residual

    def end(self) -> None:
        for b in self.buckets:
            if b.buf is not None:
                self.arena.relinquish(b.buf)
                b.buf = None

    def rebuild(self, sizes: dict[str, int]) -> bool:
        for b in self.buckets:
            numel = sum(sizes[n] for n in b.names)
            if numel <= b.numel:
                continue
            bigger = self.arena.request_any(numel)  # leak: the bucket's former buffer is overwritten
            if bigger is None:
                return False
            b.buf, b.numel = bigger, numel
        return True

    def shrink(self) -> int:
        n = 0
        for b in self.buckets:
            if b.buf is None or b.buf.numel == self.arena.small or b.numel > self.arena.small:
                continue
            lesser = self.arena.request(b.numel)  # clean: near miss, the large one it replaces is relinquished
            if lesser is None:
                break
            old, b.buf = b.buf, lesser
            lesser.data[: b.numel] = old.data[: b.numel]
            self.arena.relinquish(old)
            n += 1
        return n

    def all_reduce_scalar(self, values: list[float]) -> list[float]:
        buf = self.arena.request(len(values))  # leak: tolist copies and the buffer is dropped
        if buf is None:
            return values
        buf.data[: len(values)] = values
        if not self.all_reduce(buf.data):
            self.arena.relinquish(buf)
            return values
        return buf.data[: len(values)].tolist()

    def double_buffered(self, chunks: list[np.ndarray]) -> Iterator[np.ndarray]:
        front = self.arena.request(max(c.size for c in chunks))  # leak: no second buffer ends the generator with the first held
        if front is None:
            return
        back = self.arena.request(front.numel)  # clean: near miss, the two only swap names, the finally relinquishes both
        if back is None:
            return
        try:
            for c in chunks:
                front.data[: c.size] = c.ravel()
                self.all_reduce(front.data)
                yield front.data[: c.size]
                front, back = back, front
        finally:
            self.arena.relinquish(front)
            self.arena.relinquish(back)
