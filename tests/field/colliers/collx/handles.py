from __future__ import annotations

from typing import Callable, Optional

from .symm import SymmBuffer, SymmHeap


class Handle:
    """Owns one count of its buffer until wait()."""

    def __init__(self, heap: SymmHeap, buf: SymmBuffer, n: int) -> None:
        self.heap = heap
        self.buf: Optional[SymmBuffer] = buf
        self.n = n

    def wait(self) -> list[float]:
        assert self.buf is not None
        out = self.buf.data[:self.n]
        self.heap.release(self.buf)
        self.buf = None
        return out

    def poll(self) -> bool:
        return self.buf is None


def issue(heap: SymmHeap, xs: list[float], op: Callable[[float], float]) -> Handle:
    b = heap.acquire_or_raise()  # clean: moved into the handle
    for i, x in enumerate(xs):
        b.data[i] = op(x)
    return Handle(heap, b, len(xs))


def issue_shared(heap: SymmHeap, src: SymmBuffer, n: int) -> Handle:
    return Handle(heap, heap.retain(src), n)  # clean: the handle's own count, wait releases it
