"""Gradient bucketing with pooled communication buffers (reduce-scatter overlap)."""
from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

try:
    import torch.distributed as dist
except ImportError:
    dist = None

logger = logging.getLogger(__name__)


class CommBuffer:
    __slots__ = ("numel", "flat", "generation")

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.flat = [0.0] * numel
        self.generation = 0


class CommBufferPool:
    """Fixed number of flat buffers, at most `limit` in flight."""

    def __init__(self, numel: int, limit: int) -> None:
        self.numel = numel
        self._permits = threading.BoundedSemaphore(limit)
        self._idle: List[CommBuffer] = []
        self._lock = threading.Lock()

    def obtain(self, block: bool = True) -> Optional[CommBuffer]:
        if not self._permits.acquire(blocking=block):  # clean: near miss, the permit goes with the buffer and recycle() releases it
            return None
        with self._lock:
            buf = self._idle.pop() if self._idle else CommBuffer(self.numel)
        buf.generation += 1
        return buf

    def recycle(self, buf: CommBuffer) -> None:
        with self._lock:
            self._idle.append(buf)
        self._permits.release()


class Work:
    """Minimal torch.distributed Work."""

    def __init__(self) -> None:
        self._callbacks: List[Callable[[bool], None]] = []
        self.finished = False

    def add_done_callback(self, fn: Callable[[bool], None]) -> None:
        self._callbacks.append(fn)

    def complete(self, ok: bool = True) -> None:
        self.finished = True
        for fn in self._callbacks:
            fn(ok)

    def wait(self) -> bool:
        if not self.finished:
            self.complete()
        return True


def reduce_scatter(buf: CommBuffer) -> Work:
    return Work()


@dataclass
class Bucket:
    idx: int
    params: List[str] = field(default_factory=list)
    filled: int = 0
    buf: Optional[CommBuffer] = None
    work: Optional[Work] = None


class BucketReducer:

    def __init__(self, pool: CommBufferPool, num_buckets: int, clip: float = 1e4) -> None:
        self.pool = pool
        self.clip = clip
        self.buckets = [Bucket(i) for i in range(num_buckets)]
        self.shard: Dict[int, List[float]] = {}
        self.queue: Deque[Tuple[int, CommBuffer, Work]] = deque()
        self.norms: Dict[int, float] = {}

    # -- hooks ---------------------------------------------------------

    def grad_ready(self, idx: int, grad: List[float]) -> None:
        bucket = self.buckets[idx]
        if bucket.buf is None:
            bucket.buf = self.pool.obtain()  # clean: stays in the bucket until finish_bucket()
            bucket.filled = 0
        n = min(len(grad), bucket.buf.numel - bucket.filled)
        bucket.buf.flat[bucket.filled: bucket.filled + n] = grad[:n]
        bucket.filled += n
        if bucket.filled == bucket.buf.numel:
            bucket.work = reduce_scatter(bucket.buf)

    def finish_bucket(self, idx: int) -> None:
        bucket = self.buckets[idx]
        if bucket.buf is None:
            return
        if bucket.work is not None:
            bucket.work.wait()
        self.shard[idx] = list(bucket.buf.flat)
        self.pool.recycle(bucket.buf)
        bucket.buf = bucket.work = None

    # -- queue-driven path ---------------------------------------------

    def launch(self, idx: int, grad: List[float]) -> None:
        buf = self.pool.obtain()  # leak: drain() skips the recycle of an overflowed bucket
        buf.flat[: len(grad)] = grad
        self.queue.append((idx, buf, reduce_scatter(buf)))

    def drain(self) -> bool:
        overflow = False
        while self.queue:
            idx, buf, work = self.queue.popleft()
            work.wait()
            peak = max(map(abs, buf.flat))
            if peak > self.clip:
                logger.warning("bucket %d overflowed (%g)", idx, peak)
                overflow = True
                continue
            self.shard[idx] = list(buf.flat)
            self.pool.recycle(buf)
        return overflow

    # -- callback path -------------------------------------------------

    def launch_async(self, idx: int, grad: List[float]) -> Work:
        buf = self.pool.obtain()  # clean: near miss, the nested callback recycles on success and on failure
        buf.flat[: len(grad)] = grad
        work = reduce_scatter(buf)

        def _done(ok: bool) -> None:
            if ok:
                self.shard[idx] = list(buf.flat)
            self.pool.recycle(buf)

        work.add_done_callback(_done)
        return work

    def launch_norm(self, idx: int, grad: List[float]) -> Work:
        buf = self.pool.obtain()  # leak: the callback reads the norm and never recycles
        buf.flat[: len(grad)] = grad
        work = reduce_scatter(buf)

        def _done(ok: bool) -> None:
            if not ok:
                logger.error("norm reduction of bucket %d failed", idx)
            self.norms[idx] = sum(x * x for x in buf.flat) ** 0.5

        work.add_done_callback(_done)
        return work

    # -- opportunistic -------------------------------------------------

    def try_launch(self, idx: int, grad: List[float]) -> bool:
        buf = self.pool.obtain(block=False)  # leak: an oversized gradient returns False with the buffer in hand
        if buf is None:
            return False
        if len(grad) > buf.numel:
            return False
        buf.flat[: len(grad)] = grad
        self.queue_done(idx, buf)
        return True

    def try_launch_sized(self, idx: int, grad: List[float]) -> bool:
        if len(grad) > self.pool.numel:
            return False
        buf = self.pool.obtain(block=False)  # clean: near miss, handed to queue_done() which recycles it
        if not buf:
            return False
        buf.flat[: len(grad)] = grad
        self.queue_done(idx, buf)
        return True

    def queue_done(self, idx: int, buf: CommBuffer) -> None:
        reduce_scatter(buf).wait()
        self.shard[idx] = list(buf.flat)
        self.pool.recycle(buf)

    def all_gather_params(self, idx: int, out: List[float]) -> None:
        send = self.pool.obtain()  # clean: recycled after the gather
        recv = self.pool.obtain()  # leak: only the send buffer is recycled
        send.flat[: len(out)] = out
        reduce_scatter(send).wait()
        recv.flat[:] = send.flat
        out[:] = recv.flat[: len(out)]
        self.pool.recycle(send)

    def broadcast_buffers(self, tensors: Dict[str, List[float]]) -> int:
        done = 0
        bufs: Dict[str, CommBuffer] = {}
        for name, values in tensors.items():
            bufs[name] = self.pool.obtain()  # clean: near miss, every entry of the local dict is recycled below
            bufs[name].flat[: len(values)] = values
        for name in list(bufs):
            reduce_scatter(bufs[name]).wait()
            tensors[name][:] = bufs[name].flat[: len(tensors[name])]
            done += 1
        for buf in bufs.values():
            self.pool.recycle(buf)
        return done
