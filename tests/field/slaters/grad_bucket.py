"""Gradient bucketing on top of a pool of flat communication buffers."""
from __future__ import annotations

from array import array
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = None
    dist = None


class CommBuffer:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.view: Any = torch.zeros(capacity) if torch is not None else array("f", [0.0]) * capacity
        self.offset = 0

    def append(self, values: Sequence[float]) -> int:
        start = self.offset
        for i, v in enumerate(values):
            self.view[start + i] = v
        self.offset += len(values)
        return start


class CommBufferPool:
    def __init__(self, capacity: int, count: int) -> None:
        self.capacity = capacity
        self.count = count
        self._stack = [CommBuffer(capacity) for _ in range(count)]

    def get(self, numel: int) -> Optional[CommBuffer]:
        if not self._stack:
            return None
        buf = self._stack.pop()
        if numel > buf.capacity:
            self._stack.append(buf)
            return None
        return buf

    def get_many(self, sizes: Sequence[int]) -> Optional[List[CommBuffer]]:
        """All or nothing."""
        out: List[CommBuffer] = []
        for n in sizes:
            buf = self.get(n)  # leak: the earlier ones are dropped when a later size does not fit
            if buf is None:
                return None
            out.append(buf)
        return out

    def get_pair(self, numel: int) -> Optional[List[CommBuffer]]:
        out: List[CommBuffer] = []
        for _ in range(2):
            buf = self.get(numel)  # clean: near miss, the loop gives back what it has before None
            if buf is None:
                for b in out:
                    self.put(b)
                return None
            out.append(buf)
        return out

    def put(self, buf: CommBuffer) -> None:
        buf.offset = 0
        self._stack.append(buf)

    def idle(self) -> int:
        return len(self._stack)


class Work:
    def __init__(self, on_done: Optional[Callable[[], None]] = None) -> None:
        self._on_done = on_done

    def wait(self) -> None:
        if self._on_done is not None:
            self._on_done()
            self._on_done = None


def all_reduce_async(buf: CommBuffer, on_done: Optional[Callable[[], None]] = None) -> Work:
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.all_reduce(buf.view)
    return Work(on_done)


class Bucket:
    def __init__(self, index: int, params: List[str], numel: int) -> None:
        self.index = index
        self.params = params
        self.numel = numel
        self.pending = len(params)
        self.buffer: Optional[CommBuffer] = None
        self.work: Optional[Work] = None


class BucketReducer:
    def __init__(self, pool: CommBufferPool, buckets: List[Bucket], find_unused: bool = False) -> None:
        self.pool = pool
        self.buckets = buckets
        self.find_unused = find_unused
        self.owner = {p: b for b in buckets for p in b.params}
        self.skipped = 0

    def mark_ready(self, name: str, grad: Sequence[float]) -> None:
        bucket = self.owner[name]
        if bucket.buffer is None:
            bucket.buffer = self.pool.get(bucket.numel)  # clean: near miss, held by the bucket until finalize
            if bucket.buffer is None:
                self.skipped += 1
                return
        bucket.buffer.append(grad)
        bucket.pending -= 1
        if bucket.pending == 0:
            bucket.work = all_reduce_async(bucket.buffer)

    def finalize(self) -> None:
        for b in self.buckets:
            if b.work is not None:
                b.work.wait()
                b.work = None
            if b.buffer is not None:
                self.pool.put(b.buffer)
                b.buffer = None
            b.pending = len(b.params)


class LocalSGDReducer:
    """Reduces every `interval` steps; in between gradients stay in the bucket buffer."""

    def __init__(self, pool: CommBufferPool, interval: int) -> None:
        self.pool = pool
        self.interval = interval
        self.step = 0
        self._accum: Dict[int, CommBuffer] = {}

    def add(self, bucket: Bucket, grad: Sequence[float]) -> None:
        buf = self.pool.get(bucket.numel)  # leak: on later steps of the interval it replaces the entry already there
        if buf is None:
            return
        buf.append(grad)
        self._accum[bucket.index] = buf

    def maybe_reduce(self) -> bool:
        self.step += 1
        if self.step % self.interval:
            return False
        while self._accum:
            _, buf = self._accum.popitem()
            all_reduce_async(buf).wait()
            self.pool.put(buf)
        return True


def reduce_small(pool: CommBufferPool, grads: List[Sequence[float]]) -> List[float]:
    """Coalesces the small gradients; callers pass the tail of the bucket list."""
    total = sum(len(g) for g in grads)
    buf = pool.get(total)  # leak: rebound by the per-gradient path
    if buf is None or len(grads) == 1:
        sums = []
        for g in grads:
            buf = pool.get(len(g))  # clean: given back in the same round
            if buf is None:
                continue
            buf.append(g)
            sums.append(float(sum(g)))
            pool.put(buf)
        return sums
    for g in grads:
        buf.append(g)
    all_reduce_async(buf).wait()
    pool.put(buf)
    return [float(sum(g)) for g in grads]


def reduce_expert(pool: CommBufferPool, numel: int, grad: Sequence[float], hook: Optional[Callable[[CommBuffer], None]] = None) -> Work:
    buf = pool.get(numel)  # clean: near miss, the completion callback puts it back
    if buf is None:
        return Work()
    buf.append(grad)
    if hook is not None:
        hook(buf)
    return all_reduce_async(buf, on_done=lambda: pool.put(buf))


@contextmanager
def coalescing(pool: CommBufferPool, numel: int) -> Iterator[Optional[CommBuffer]]:
    buf = pool.get(numel)  # clean: near miss, finally with the same None guard
    try:
        yield buf
    finally:
        if buf is not None:
            pool.put(buf)


def sync_buffers(pool: CommBufferPool, buffers: List[Sequence[float]]) -> int:
    synced = 0
    for b in buffers:
        with coalescing(pool, len(b)) as buf:  # clean: with
            if buf is None:
                continue
            buf.append(b)
            synced += 1
    return synced


def broadcast_pair(pool: CommBufferPool, values: Sequence[float], compress: bool) -> Optional[float]:
    pair = pool.get_pair(len(values))  # leak: the compressed way puts back only the first of the two
    if pair is None:
        return None
    src, dst = pair
    src.append(values)
    if compress:
        pool.put(src)
        return float(max(values))
    dst.append(values)
    pool.put(src)
    pool.put(dst)
    return float(sum(values))


def warm_up(pool: CommBufferPool, sizes: Sequence[int]) -> bool:
    bufs = pool.get_many(sizes)  # clean: all put back
    if bufs is None:
        return False
    for b in bufs:
        all_reduce_async(b).wait()
    for b in bufs:
        pool.put(b)
    return True


def main() -> None:
    pool = CommBufferPool(16, 6)
    buckets = [Bucket(0, ["a", "b"], 8), Bucket(1, ["c"], 4)]
    red = BucketReducer(pool, buckets)
    for n in "abc":
        red.mark_ready(n, [1.0, 2.0])
    red.finalize()
    local = LocalSGDReducer(pool, 1)
    local.add(buckets[0], [1.0])
    local.maybe_reduce()
    reduce_small(pool, [[1.0], [2.0]])
    reduce_expert(pool, 4, [1.0]).wait()  # clean: wait runs the callback
    sync_buffers(pool, [[1.0], [2.0]])
    broadcast_pair(pool, [1.0, 2.0], compress=False)
    warm_up(pool, [4, 4])
    print("idle", pool.idle())


if __name__ == "__main__":
    main()
