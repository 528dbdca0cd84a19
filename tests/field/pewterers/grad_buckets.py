"""Bucketed gradient reduction with pooled communication buffers."""
from __future__ import annotations

from collections import deque
from typing import Callable, Deque, Dict, List, Optional, Sequence, Tuple


class CommBuffer:
    __slots__ = ("data", "names")

    def __init__(self, numel: int) -> None:
        self.data = [0.0] * numel
        self.names: List[str] = []


class CommBufferPool:
    def __init__(self, count: int, numel: int) -> None:
        self._bench = [CommBuffer(numel) for _ in range(count)]
        self.numel = numel

    def draw(self) -> Optional[CommBuffer]:
        if not self._bench:
            return None
        buf = self._bench.pop()
        buf.names = []
        return buf

    def restore(self, buf: CommBuffer) -> None:
        self._bench.append(buf)

    def benched(self) -> int:
        return len(self._bench)


class Work:
    """Handle of one asynchronous reduction."""

    def __init__(self, buf: CommBuffer, world: int) -> None:
        self.buf = buf
        self.world = world

    def wait(self) -> None:
        self.buf.data[:] = [x / self.world for x in self.buf.data]


class GradReducer:
    def __init__(self, pool: CommBufferPool, world: int) -> None:
        self.pool = pool
        self.world = world
        self._inflight: Deque[Work] = deque()
        self._delayed: List[CommBuffer] = []
        self.grads: Dict[str, float] = {}
        self.overflowed = 0

    def _pack(self, buf: CommBuffer, named: Sequence[Tuple[str, float]]) -> None:
        for i, (name, g) in enumerate(named):
            buf.data[i] = g
            buf.names.append(name)

    def _unpack(self, buf: CommBuffer) -> None:
        for name, g in zip(buf.names, buf.data):
            self.grads[name] = g

    def launch(self, named: Sequence[Tuple[str, float]]) -> bool:
        buf = self.pool.draw()  # clean: moved into the in-flight work, drain() restores it
        if buf is None:
            return False
        self._pack(buf, named)
        self._inflight.append(Work(buf, self.world))
        return True

    def drain(self) -> None:
        while self._inflight:
            work = self._inflight.popleft()
            work.wait()
            self._unpack(work.buf)
            self.pool.restore(work.buf)

    def delay(self, named: Sequence[Tuple[str, float]]) -> bool:
        """Keeps a bucket for the accumulation step."""
        buf = self.pool.draw()  # leak: zero_grad() clears the delayed list without restoring
        if buf is None:
            return False
        self._pack(buf, named)
        self._delayed.append(buf)
        return True

    def flush_delayed(self) -> int:
        n = len(self._delayed)
        while self._delayed:
            self._inflight.append(Work(self._delayed.pop(), self.world))
        return n

    def zero_grad(self) -> None:
        self.grads.clear()
        self._delayed.clear()

    def reduce_now(self, buckets: Sequence[Sequence[Tuple[str, float]]]) -> int:
        reduced = 0
        for named in buckets:
            buf = self.pool.draw()  # leak: continue on an overflowed bucket
            if buf is None:
                self.drain()
                buf = self.pool.draw()  # leak: same continue for the buffer had after draining
                if buf is None:
                    break
            self._pack(buf, named)
            if any(x != x for x in buf.data):
                self.overflowed += 1
                continue
            work = Work(buf, self.world)
            work.wait()
            self._unpack(buf)
            self.pool.restore(buf)
            reduced += 1
        return reduced

    def norm(self, named: Sequence[Tuple[str, float]], on_ready: Callable[[float], None]) -> bool:
        buf = self.pool.draw()  # clean: near miss, only the failed draw returns before the restore
        if buf is None:
            return False
        self._pack(buf, named)
        squares = sum(x * x for x in buf.data[:len(named)])
        self.pool.restore(buf)
        on_ready(squares ** 0.5)
        return True

    def double_buffered(self, buckets: Sequence[Sequence[Tuple[str, float]]]) -> int:
        """Packs the next bucket while the previous one is reduced."""
        prev: Optional[Work] = None
        done = 0
        for named in buckets:
            buf = self.pool.draw()  # clean: near miss, becomes prev, which is retired on the next turn or after the loop
            if buf is None:
                break
            self._pack(buf, named)
            if prev is not None:
                self._retire(prev)
                done += 1
            prev = Work(buf, self.world)
        if prev is not None:
            self._retire(prev)
            done += 1
        return done

    def _retire(self, work: Work) -> None:
        work.wait()
        self._unpack(work.buf)
        self.pool.restore(work.buf)
