"""Side streams for copies in either direction."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, List


class CopyStream:
    def __init__(self, index: int):
        self.index = index
        self.copies = 0

    def copy(self, dst, payload: bytes) -> None:
        dst.write(payload)
        self.copies += 1

    def synchronize(self) -> None:
        pass


class StreamPool:
    def __init__(self, n: int = 4):
        self._idle: List[CopyStream] = [CopyStream(i) for i in range(n)]

    def borrow(self) -> CopyStream:
        if not self._idle:
            raise RuntimeError("no idle copy stream")
        return self._idle.pop()

    def give_back(self, s: CopyStream) -> None:
        self._idle.append(s)

    @property
    def idle(self) -> int:
        return len(self._idle)


@contextmanager
def copy_stream(pool: StreamPool) -> Iterator[CopyStream]:
    s = pool.borrow()  # clean: given back in finally
    try:
        yield s
    finally:
        s.synchronize()
        pool.give_back(s)


@contextmanager
def ordered_stream(pool: StreamPool, after: CopyStream) -> Iterator[CopyStream]:
    """A stream that starts behind `after`."""
    s = pool.borrow()  # leak: not given back when `after` never copied anything
    if after.copies == 0:
        yield after
        return
    after.synchronize()
    try:
        yield s
    finally:
        pool.give_back(s)
