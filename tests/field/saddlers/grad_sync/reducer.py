from __future__ import annotations

import math
from typing import Callable, Dict, Iterable, List, Optional

from .buffers import CommBuffers, FlatBuffer

Grad = List[float]


class Work:
    """Handle of an asynchronous all-reduce."""

    def __init__(self, buf: FlatBuffer, world: int) -> None:
        self.buf = buf
        self.world = world
        self._callbacks: List[Callable[["Work"], None]] = []

    def then(self, fn: Callable[["Work"], None]) -> None:
        self._callbacks.append(fn)

    def wait(self) -> Grad:
        out = [x * self.world for x in self.buf.data[:self.buf.used]]
        for fn in self._callbacks:
            fn(self)
        return out


class BucketReducer:
    """Reduces gradients bucket by bucket. Subclasses choose when a bucket goes out."""

    def __init__(self, buffers: CommBuffers, world: int = 2) -> None:
        self.buffers = buffers
        self.world = world
        self.bucket: Optional[FlatBuffer] = None
        self.pending: List[Work] = []

    def all_reduce(self, buf: FlatBuffer) -> Work:
        return Work(buf, self.world)

    def push(self, grad: Grad) -> None:
        if self.bucket is None:
            self.bucket = self.buffers.obtain()  # clean: the bucket becomes pending, finish relinquishes
        if not self.bucket.pack(grad):
            self.pending.append(self.all_reduce(self.bucket))
            self.bucket = self.buffers.obtain()  # clean: near miss, the former bucket travels in its pending work
            self.bucket.pack(grad)

    def finish(self) -> List[Grad]:
        if self.bucket is not None:
            self.pending.append(self.all_reduce(self.bucket))
            self.bucket = None
        out = []
        for work in self.pending:
            out.append(work.wait())
            self.buffers.relinquish(work.buf)
        self.pending.clear()
        return out


class OverlapReducer(BucketReducer):
    def push_overlapped(self, grads: Iterable[Grad]) -> int:
        launched = 0
        for grad in grads:
            buf = self.buffers.obtain()  # leak: continue for a gradient that does not fit drops the buffer
            if not buf.pack(grad):
                continue
            work = self.all_reduce(buf)
            work.then(lambda w: self.buffers.relinquish(w.buf))
            work.wait()
            launched += 1
        return launched

    def reduce_one(self, grad: Grad) -> Grad:
        buf = self.buffers.obtain()  # clean: near miss, the work's callback relinquishes
        buf.pack(grad)
        work = self.all_reduce(buf)
        work.then(lambda w: self.buffers.relinquish(w.buf))
        return work.wait()

    def reduce_if_finite(self, grad: Grad) -> Optional[Grad]:
        buf = self.buffers.obtain()  # leak: the non-finite way registers no callback and returns
        buf.pack(grad)
        work = self.all_reduce(buf)
        if any(math.isinf(x) or math.isnan(x) for x in grad):
            return None
        work.then(lambda w: self.buffers.relinquish(w.buf))
        return work.wait()


class ParamSync:
    """Broadcasts parameters at start and at each checkpoint."""

    def __init__(self, buffers: CommBuffers) -> None:
        self.buffers = buffers
        self.by_group: Dict[str, FlatBuffer] = {}

    def open_group(self, name: str) -> bool:
        if name in self.by_group:
            return True
        buf = self.buffers.obtain_or_none()  # clean: the group owns it until close_group
        if buf is None:
            return False
        self.by_group[name] = buf
        return True

    def close_group(self, name: str) -> None:
        self.buffers.relinquish(self.by_group.pop(name))

    def forget_stale(self, keep: List[str]) -> None:
        for name in [n for n in self.by_group if n not in keep]:
            self.close_group(name)

    def broadcast(self, params: List[Grad]) -> int:
        buf = self.buffers.obtain_or_none()  # leak: returns -1 for an oversized parameter
        if buf is None:
            return 0
        sent = 0
        for p in params:
            if len(p) > buf.numel:
                return -1
            buf.used = 0
            buf.pack(p)
            sent += 1
        self.buffers.relinquish(buf)
        return sent

    def _flatten(self, params: List[Grad]) -> FlatBuffer:
        buf = self.buffers.obtain()  # clean: handed to the caller
        for p in params:
            buf.pack(p)
        return buf

    def norm(self, params: List[Grad]) -> float:
        flat = list(self._flatten(params).data)  # leak: the flat buffer is copied and dropped
        return math.sqrt(sum(x * x for x in flat))

    def checksum(self, params: List[Grad]) -> float:
        flat = self._flatten(params)  # clean: relinquished after the sum
        total = sum(flat.data[:flat.used])
        self.buffers.relinquish(flat)
        return total

    def two_phase(self, grads: Grad, params: List[Grad]) -> bool:
        send = self.buffers.obtain_or_none()  # leak: no rollback when there is no receive buffer
        if send is None:
            return False
        recv = self.buffers.obtain_or_none()  # clean: relinquished at the end
        if recv is None:
            return False
        send.pack(grads)
        for p in params:
            recv.pack(p)
        self.buffers.relinquish(recv)
        self.buffers.relinquish(send)
        return True
