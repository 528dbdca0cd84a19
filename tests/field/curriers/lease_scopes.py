"""Scoped leases of graph buffers: context managers, generators and explicit pairs."""
from __future__ import annotations

import contextlib
from typing import Dict, Iterable, Iterator, List, Optional


class GraphBuffer:
    def __init__(self, index: int) -> None:
        self.index = index
        self.value = 0


class BufferArena:
    def __init__(self, n: int) -> None:
        self._spare = [GraphBuffer(i) for i in range(n)]

    def lease(self) -> GraphBuffer:
        return self._spare.pop()

    def lease_or_none(self) -> Optional[GraphBuffer]:
        return self._spare.pop() if self._spare else None

    def end(self, buf: GraphBuffer) -> None:
        self._spare.append(buf)

    def spare(self) -> int:
        return len(self._spare)


class CaptureScope:
    """Leases on enter; keeps going when a capture fails."""

    def __init__(self, arena: BufferArena) -> None:
        self.arena = arena
        self.buf: Optional[GraphBuffer] = None

    def __enter__(self) -> GraphBuffer:
        self.buf = self.arena.lease()  # leak: __exit__ returns early for a RuntimeError
        return self.buf

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, RuntimeError):
            return True
        self.arena.end(self.buf)
        self.buf = None
        return False


class ReplayScope:
    def __init__(self, arena: BufferArena) -> None:
        self.arena = arena
        self.buf: Optional[GraphBuffer] = None

    def __enter__(self) -> GraphBuffer:
        self.buf = self.arena.lease()  # clean: near miss, ended before the early return of __exit__
        return self.buf

    def __exit__(self, exc_type, exc, tb) -> bool:
        buf, self.buf = self.buf, None
        self.arena.end(buf)
        if exc_type is not None and issubclass(exc_type, RuntimeError):
            return True
        return False


class LazyScope:
    def __init__(self, arena: BufferArena) -> None:
        self.arena = arena
        self._buf: Optional[GraphBuffer] = None

    def __enter__(self) -> "LazyScope":
        return self

    def buffer(self) -> GraphBuffer:
        if self._buf is None:
            self._buf = self.arena.lease()  # clean: near miss, leased once and ended in __exit__
        return self._buf

    def __exit__(self, *exc) -> None:
        if self._buf is None:
            return
        self.arena.end(self._buf)
        self._buf = None


class MultiScope:
    def __init__(self, arena: BufferArena, n: int) -> None:
        self.arena = arena
        self.n = n
        self.held: List[GraphBuffer] = []

    def __enter__(self) -> List[GraphBuffer]:
        for _ in range(self.n):
            self.held.append(self.arena.lease())  # leak: __exit__ ends only the last one
        return self.held

    def __exit__(self, *exc) -> None:
        if self.held:
            self.arena.end(self.held.pop())
        self.held = []


@contextlib.contextmanager
def scratch(arena: BufferArena) -> Iterator[GraphBuffer]:
    buf = arena.lease()  # clean: finally
    try:
        yield buf
    finally:
        arena.end(buf)


@contextlib.contextmanager
def scratch_if(arena: BufferArena, wanted: bool) -> Iterator[Optional[GraphBuffer]]:
    buf = arena.lease() if wanted else None  # clean: near miss, ended whenever there is one
    try:
        yield buf
    finally:
        if wanted:
            arena.end(buf)


@contextlib.contextmanager
def tolerant(arena: BufferArena) -> Iterator[GraphBuffer]:
    buf = arena.lease()  # leak: a ValueError of the body is swallowed before the end
    try:
        yield buf
    except ValueError:
        return
    arena.end(buf)


def windows(arena: BufferArena, values: Iterable[int]) -> Iterator[int]:
    for v in values:
        buf = arena.lease()  # leak: a negative value skips the end
        buf.value = v
        if v < 0:
            continue
        yield buf.value * 2
        arena.end(buf)


def accumulate(arena: BufferArena, values: Iterable[int]) -> Iterator[int]:
    buf = arena.lease()  # clean: finally, also when the consumer stops
    buf.value = 0
    try:
        for v in values:
            if v < 0:
                return
            buf.value += v
            yield buf.value
    finally:
        arena.end(buf)


def leased(arena: BufferArena, n: int) -> Iterator[GraphBuffer]:
    """Yields leases; the consumer ends each."""
    for _ in range(n):
        buf = arena.lease_or_none()  # clean: handed to the consumer
        if buf is None:
            return
        yield buf


def consume(arena: BufferArena, n: int) -> int:
    total = 0
    for buf in leased(arena, n):  # clean: each is ended in the loop
        total += buf.index
        arena.end(buf)
    return total


def find_index(arena: BufferArena, n: int, want: int) -> bool:
    for buf in leased(arena, n):  # leak: the one that matches is dropped by the return
        if buf.index == want:
            return True
        arena.end(buf)
    return False


def with_stack(arena: BufferArena, n: int) -> int:
    with contextlib.ExitStack() as stack:
        bufs = []
        for _ in range(n):
            buf = arena.lease()  # clean: near miss, the exit stack's callback ends it
            stack.callback(arena.end, buf)
            bufs.append(buf)
        return sum(b.index for b in bufs)


def with_moved_stack(arena: BufferArena, n: int) -> int:
    with contextlib.ExitStack() as stack:
        bufs = []
        for _ in range(n):
            buf = arena.lease()  # leak: pop_all moves the callbacks into a stack that nobody closes
            stack.callback(arena.end, buf)
            bufs.append(buf)
        stack.pop_all()
        return sum(b.index for b in bufs)


if __name__ == "__main__":
    a = BufferArena(6)
    with ReplayScope(a) as rb:  # clean: context manager
        rb.value = 1
    with scratch(a) as sb, LazyScope(a) as lz:  # clean: context manager
        lz.buffer().value = sb.value
    print(list(accumulate(a, [1, 2, -1])), consume(a, 3), with_stack(a, 2), a.spare())
