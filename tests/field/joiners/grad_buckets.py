"""Gradient bucket reducer with overlapped all-reduce."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple


class FlatBuffer:
    __slots__ = ("data", "fill")

    def __init__(self, numel: int):
        self.data = [0.0] * numel
        self.fill = 0


class FlatBufferPool:
    def __init__(self):
        self._free: Dict[int, List[FlatBuffer]] = {}
        self._lock = threading.Lock()
        self.outstanding = 0

    def checkout(self, numel: int) -> FlatBuffer:
        with self._lock:
            self.outstanding += 1
            free = self._free.get(numel)
            buf = free.pop() if free else FlatBuffer(numel)
            buf.fill = 0
            return buf

    def checkin(self, buf: FlatBuffer) -> None:
        with self._lock:
            self.outstanding -= 1
            self._free.setdefault(len(buf.data), []).append(buf)


class ReduceFuture:
    def __init__(self):
        self._callbacks: List[Callable[["ReduceFuture"], None]] = []
        self.error: Optional[Exception] = None
        self.done = False

    def add_done_callback(self, fn: Callable[["ReduceFuture"], None]) -> None:
        if self.done:
            fn(self)
        else:
            self._callbacks.append(fn)

    def finish(self, error: Optional[Exception] = None) -> None:
        self.error, self.done = error, True
        for fn in self._callbacks:
            fn(self)


class Transport:
    """Queues reductions; poll() finishes them."""

    def __init__(self, world: int = 2):
        self.world = world
        self.queue: List[Tuple[FlatBuffer, ReduceFuture]] = []

    def all_reduce(self, buf: FlatBuffer) -> ReduceFuture:
        fut = ReduceFuture()
        self.queue.append((buf, fut))
        return fut

    def poll(self, error: Optional[Exception] = None) -> None:
        queue, self.queue = self.queue, []
        for buf, fut in queue:
            if error is None:
                buf.data = [x * self.world for x in buf.data]
            fut.finish(error)


@dataclass
class Bucket:
    buf: FlatBuffer
    spans: List[Tuple[str, int, int]] = field(default_factory=list)

    def put(self, name: str, grad: List[float]) -> None:
        start = self.buf.fill
        self.buf.data[start:start + len(grad)] = grad
        self.buf.fill = start + len(grad)
        self.spans.append((name, start, len(grad)))


class BucketReducer:
    def __init__(self, pool: FlatBufferPool, transport: Transport, numel: int = 1024):
        self.pool = pool
        self.transport = transport
        self.numel = numel
        self.current: Optional[Bucket] = None
        self.grads: Dict[str, List[float]] = {}
        self.failed: List[Exception] = []

    def _open(self) -> Bucket:
        return Bucket(self.pool.checkout(self.numel))  # clean: handed to the caller in the bucket

    def add(self, name: str, grad: List[float]) -> None:
        if self.current is None:
            self.current = self._open()  # leak: the done callback returns on error before the checkin
        if self.current.buf.fill + len(grad) > self.numel:
            self.flush()
            self.current = self._open()  # leak: same way, a failed reduction is recorded and its buffer dropped
        self.current.put(name, grad)

    def flush(self) -> None:
        bucket, self.current = self.current, None
        if bucket is None:
            return
        fut = self.transport.all_reduce(bucket.buf)
        fut.add_done_callback(lambda f, b=bucket: self._unpack(f, b))

    def _unpack(self, fut: ReduceFuture, bucket: Bucket) -> None:
        if fut.error is not None:
            self.failed.append(fut.error)
            return
        for name, start, n in bucket.spans:
            self.grads[name] = bucket.buf.data[start:start + n]
        self.pool.checkin(bucket.buf)

    def reduce_now(self, name: str, grad: List[float]) -> None:
        """A bucket of its own for an oversized gradient."""
        buf = self.pool.checkout(len(grad))  # clean: near miss, the callback checks in on both ways
        buf.data[:] = grad

        def finished(fut: ReduceFuture) -> None:
            try:
                if fut.error is not None:
                    self.failed.append(fut.error)
                    return
                self.grads[name] = list(buf.data)
            finally:
                self.pool.checkin(buf)

        self.transport.all_reduce(buf).add_done_callback(finished)


class GradNorms:
    def __init__(self, pool: FlatBufferPool):
        self.pool = pool

    def squares(self, grad: List[float]) -> FlatBuffer:
        buf = self.pool.checkout(len(grad))  # clean: returned
        buf.data[:] = [g * g for g in grad]
        return buf

    def norm(self, grads: Dict[str, List[float]]) -> float:
        total = 0.0
        for grad in grads.values():
            total += sum(self.squares(grad).data)  # leak: summed and dropped
        return total ** 0.5

    def has_overflow(self, grads: Dict[str, List[float]]) -> bool:
        work = None
        try:
            for grad in grads.values():
                if work is not None:
                    self.pool.checkin(work)
                work = self.pool.checkout(len(grad))  # clean: near miss, checked in before rebinding and in finally
                work.data[:] = [abs(g) for g in grad]
                if any(g != g or g > 1e30 for g in work.data):
                    return True
            return False
        finally:
            if work is not None:
                self.pool.checkin(work)


class AccumulatedGrads:
    """Sums micro-batch gradients into flat buffers by name."""

    def __init__(self, pool: FlatBufferPool):
        self.pool = pool
        self.sums: Dict[str, FlatBuffer] = {}

    def accumulate(self, name: str, grad: List[float]) -> None:
        buf = self.sums.get(name)
        if buf is None or len(buf.data) != len(grad):
            buf = self.pool.checkout(len(grad))  # leak: a buffer of another size under name is overwritten
            buf.data[:] = [0.0] * len(grad)
            self.sums[name] = buf
        for i, g in enumerate(grad):
            buf.data[i] += g

    def zero(self) -> None:
        for buf in self.sums.values():
            self.pool.checkin(buf)
        self.sums.clear()
