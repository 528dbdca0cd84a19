"""Bucketed gradient reduction with asynchronous completion callbacks."""
from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Tuple


@dataclass
class CommBuffer:
    slot: int
    data: List[float]
    fill: int = 0


class CommBufferPool:
    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._all = [CommBuffer(i, [0.0] * numel) for i in range(count)]
        self._stack: Deque[CommBuffer] = deque(self._all)

    def get(self) -> CommBuffer:
        buf = self._stack.pop()
        buf.fill = 0
        return buf

    def put(self, buf: CommBuffer) -> None:
        self._stack.append(buf)

    def idle(self) -> int:
        return len(self._stack)


class Work:
    """Handle of a collective; `then` runs when it completes."""

    def __init__(self) -> None:
        self._callbacks: List[Callable[[], None]] = []
        self.done = False
        self.error: Optional[str] = None

    def then(self, fn: Callable[[], None]) -> None:
        if self.done:
            fn()
        else:
            self._callbacks.append(fn)

    def complete(self, error: Optional[str] = None) -> None:
        self.done = True
        self.error = error
        for fn in self._callbacks:
            fn()
        self._callbacks.clear()


class Transport:
    def __init__(self) -> None:
        self.pending: List[Work] = []

    def all_reduce(self, buf: CommBuffer) -> Work:
        work = Work()
        self.pending.append(work)
        return work

    def progress(self) -> None:
        ready, self.pending = self.pending, []
        for work in ready:
            work.complete()


class BucketReducer:
    def __init__(self, pool: CommBufferPool, transport: Transport, world: int) -> None:
        self.pool = pool
        self.transport = transport
        self.world = world
        self.current: Optional[CommBuffer] = None
        self.reduced: Dict[str, List[float]] = {}
        self._queue: Deque[Tuple[Work, CommBuffer]] = deque()
        self.errors = 0

    def add(self, grad: List[float]) -> None:
        """Packs a gradient into the open bucket, flushing it when full."""
        if self.current is None:
            self.current = self.pool.get()  # clean: near miss, flush queues it before the field is cleared
        if self.current.fill + len(grad) > self.pool.numel:
            self.flush()
            self.current = self.pool.get()  # clean: near miss, flush has emptied the field
        at = self.current.fill
        self.current.data[at:at + len(grad)] = grad
        self.current.fill += len(grad)

    def flush(self) -> None:
        if self.current is None:
            return
        buf, self.current = self.current, None
        self._queue.append((self.transport.all_reduce(buf), buf))

    def wait_all(self) -> None:
        self.flush()
        self.transport.progress()
        while self._queue:
            work, buf = self._queue.popleft()
            if work.error:
                self.errors += 1
            self.pool.put(buf)

    def start_bucket(self, hint: int) -> None:
        if self.current is not None and self.current.fill + hint <= self.pool.numel:
            return
        if self.current is not None and self.current.fill > 0:
            self.flush()
        elif self.current is not None:
            self.pool.put(self.current)
        self.current = self.pool.get()  # clean: near miss, on each way the field was empty, flushed or put

    def reduce_now(self, name: str, grad: List[float]) -> Work:
        buf = self.pool.get()  # clean: the completion callback puts it
        buf.data[:len(grad)] = grad
        work = self.transport.all_reduce(buf)

        def done() -> None:
            self.reduced[name] = [x / self.world for x in buf.data[:len(grad)]]
            self.pool.put(buf)

        work.then(done)
        return work

    def reduce_checked(self, name: str, grad: List[float]) -> Work:
        buf = self.pool.get()  # leak: the callback returns before the put when the work failed
        buf.data[:len(grad)] = grad
        work = self.transport.all_reduce(buf)

        def done() -> None:
            if work.error is not None:
                self.errors += 1
                return
            self.reduced[name] = list(buf.data[:len(grad)])
            self.pool.put(buf)

        work.then(done)
        return work

    def reduce_many(self, grads: Dict[str, List[float]]) -> None:
        for name, grad in grads.items():
            buf = self.pool.get()  # leak: late-bound callback puts only the last buffer, again and again
            buf.data[:len(grad)] = grad
            self.transport.all_reduce(buf).then(lambda: self.pool.put(buf))

    def reduce_each(self, grads: Dict[str, List[float]]) -> None:
        for name, grad in grads.items():
            buf = self.pool.get()  # clean: near miss, default argument binds each buffer
            buf.data[:len(grad)] = grad
            self.transport.all_reduce(buf).then(lambda b=buf: self.pool.put(b))

    def _averaged(self, grad: List[float]) -> CommBuffer:
        buf = self.pool.get()  # clean: returned
        buf.data[:len(grad)] = [g / self.world for g in grad]
        buf.fill = len(grad)
        return buf

    def averaged_copy(self, grad: List[float]) -> List[float]:
        buf = self._averaged(grad)  # leak: sliced copy returned, buffer dropped
        return buf.data[:buf.fill]

    def averaged_into(self, grad: List[float], out: List[float]) -> None:
        buf = self._averaged(grad)  # clean: put after the copy
        out[:] = buf.data[:buf.fill]
        self.pool.put(buf)

    def compress(self, grad: List[float], ratio: float) -> List[float]:
        buf = self._averaged(grad)  # clean: near miss, put on both branches
        if ratio >= 1.0:
            dense = list(buf.data[:buf.fill])
            self.pool.put(buf)
            return dense
        keep = max(1, int(buf.fill * ratio))
        top = sorted(buf.data[:buf.fill], key=abs, reverse=True)[:keep]
        self.pool.put(buf)
        return top


class FutureReducer:
    """Hands buffers out through futures; the consumer puts them back."""

    def __init__(self, pool: CommBufferPool) -> None:
        self.pool = pool
        self.cancelled = 0

    def submit(self, grad: List[float]) -> "Future[CommBuffer]":
        fut: "Future[CommBuffer]" = Future()
        buf = self.pool.get()  # clean: near miss, goes out as the future's result
        buf.data[:len(grad)] = grad
        fut.set_result(buf)
        return fut

    def resolve(self, fut: "Future[CommBuffer]", grad: List[float]) -> bool:
        buf = self.pool.get()  # leak: a cancelled future never receives it
        buf.data[:len(grad)] = grad
        if not fut.set_running_or_notify_cancel():
            self.cancelled += 1
            return False
        fut.set_result(buf)
        return True

    def consume(self, grads: List[List[float]]) -> float:
        total = 0.0
        futures = [self.submit(g) for g in grads]  # clean: each result is put in the loop
        for fut in futures:
            buf = fut.result()
            total += sum(buf.data)
            self.pool.put(buf)
        return total

    def first(self, grads: List[List[float]]) -> List[float]:
        futures = [self.submit(g) for g in grads]  # leak: results after the first are never put
        buf = futures[0].result()
        out = list(buf.data)
        self.pool.put(buf)
        return out
