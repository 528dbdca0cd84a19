from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Iterable, Optional


@dataclass
class Span:
    offset: int
    numel: int


class FlatArena:
    def __init__(self, numel: int) -> None:
        self._holes: list[Span] = [Span(0, numel)]

    def carve(self, numel: int) -> Optional[Span]:
        for i, hole in enumerate(self._holes):
            if hole.numel >= numel:
                span = Span(hole.offset, numel)
                hole.offset += numel
                hole.numel -= numel
                if hole.numel == 0:
                    del self._holes[i]
                return span
        return None

    def uncarve(self, span: Span) -> None:
        self._holes.append(Span(span.offset, span.numel))
        self._holes.sort(key=lambda s: s.offset)

    def largest(self) -> int:
        return max((h.numel for h in self._holes), default=0)


class CommBuffers:
    def __init__(self, count: int, numel: int) -> None:
        self._ring: deque[list[float]] = deque([0.0] * numel for _ in range(count))

    def get(self) -> Optional[list[float]]:
        return self._ring.popleft() if self._ring else None

    def put(self, buf: list[float]) -> None:
        self._ring.append(buf)


class WorkHandle:
    def __init__(self, on_done: Callable[[], None]) -> None:
        self.on_done = on_done
        self.waited = False

    def wait(self) -> None:
        if not self.waited:
            self.waited = True
            self.on_done()


@dataclass
class Bucket:
    index: int
    numel: int
    span: Optional[Span] = None
    residual: Optional[Span] = None
    params: list[str] = field(default_factory=list)


class GradReducer:
    def __init__(self, arena: FlatArena, comm: CommBuffers, compress: bool) -> None:
        self.arena = arena
        self.comm = comm
        self.compress = compress
        self.buckets: dict[int, Bucket] = {}
        self.handles: list[WorkHandle] = []
        self.pending: deque[tuple[Bucket, list[float]]] = deque()

    def build(self, sizes: Iterable[int]) -> bool:
        self.teardown()
        for i, numel in enumerate(sizes):
            bucket = Bucket(i, numel)
            bucket.span = self.arena.carve(numel)  # leak: a refused residual returns before this bucket is in the table, its span with it
            if bucket.span is None:
                return False
            if self.compress:
                bucket.residual = self.arena.carve(numel)  # clean: stored with the bucket, teardown uncarves it
                if bucket.residual is None:
                    return False
            self.buckets[i] = bucket
        return True

    def teardown(self) -> None:
        for bucket in self.buckets.values():
            if bucket.span is not None:
                self.arena.uncarve(bucket.span)
            if bucket.residual is not None:
                self.arena.uncarve(bucket.residual)
        self.buckets.clear()

    def resize(self, index: int, numel: int) -> bool:
        bucket = self.buckets[index]
        if bucket.span is not None:
            self.arena.uncarve(bucket.span)
            bucket.span = None
        span = self.arena.carve(numel)  # clean: near miss, the field was emptied above and takes the new span
        if span is None:
            return False
        bucket.span, bucket.numel = span, numel
        return True

    def split(self, index: int, cut: int) -> bool:
        bucket = self.buckets[index]
        left = self.arena.carve(cut)  # clean: near miss, uncarved when there is no right half, else it is the bucket's span
        if left is None:
            return False
        right = self.arena.carve(bucket.numel - cut)  # clean: becomes the span of the new bucket in the table
        if right is None:
            self.arena.uncarve(left)
            return False
        if bucket.span is not None:
            self.arena.uncarve(bucket.span)
        bucket.span, tail = left, Bucket(len(self.buckets), bucket.numel - cut, right)
        self.buckets[tail.index] = tail
        bucket.numel = cut
        return True

    def flush_async(self, bucket: Bucket) -> bool:
        buf = self.comm.get()  # clean: near miss, the handle's callback puts it back once waited for in synchronize()
        if buf is None:
            return False
        self.handles.append(WorkHandle(lambda: self.comm.put(buf)))
        return True

    def synchronize(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()

    def flush_bucket(self, bucket: Bucket, grads: list[float]) -> bool:
        buf = self.comm.get()  # leak: an overflow skips the step with the buffer neither queued nor put back
        if buf is None:
            return False
        buf[: len(grads)] = grads
        if any(g != g for g in grads):
            return False
        self.pending.append((bucket, buf))
        return True

    def drain(self) -> int:
        reduced = 0
        while self.pending:
            bucket, buf = self.pending.popleft()
            self.comm.put(buf)
            reduced += bucket.numel
        return reduced

    def allgather(self, shards: list[list[float]]) -> list[float]:
        out: list[float] = []
        buf: Optional[list[float]] = None
        for shard in shards:
            buf = self.comm.get()  # leak: each round takes another buffer and only the last one is put back after the loop
            if buf is None:
                return out
            buf[: len(shard)] = shard
            out.extend(buf[: len(shard)])
        if buf is not None:
            self.comm.put(buf)
        return out

    def broadcast(self, shards: list[list[float]]) -> list[float]:
        out: list[float] = []
        for shard in shards:
            buf = self.comm.get()  # clean: near miss, each round puts its buffer back before the next one
            if buf is None:
                return out
            buf[: len(shard)] = shard
            out.extend(buf[: len(shard)])
            self.comm.put(buf)
        return out

    def allreduce_double(self, grads: list[float]) -> float:
        send = self.comm.get()  # clean: put back in either branch
        recv = self.comm.get()  # clean: near miss, put back even when the other one is missing
        total = 0.0
        if send is not None and recv is not None:
            send[: len(grads)] = grads
            recv[: len(grads)] = send[: len(grads)]
            total = sum(recv[: len(grads)])
        for buf in (send, recv):
            if buf is not None:
                self.comm.put(buf)
        return total
