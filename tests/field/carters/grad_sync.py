"""Bucketed gradient reduction for adapter fine-tuning with a bounded set of communication buffers."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, Iterable, Optional, Sequence

log = logging.getLogger(__name__)

Callback = Callable[["Work"], None]


class CommBuffer:
    __slots__ = ("index", "flat", "filled")

    def __init__(self, index: int, numel: int) -> None:
        self.index = index
        self.flat = [0.0] * numel
        self.filled = 0

    def pack(self, grads: Sequence[float]) -> bool:
        end = self.filled + len(grads)
        if end > len(self.flat):
            return False
        self.flat[self.filled : end] = grads
        self.filled = end
        return True


class CommBufferPool:
    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._free = [CommBuffer(i, numel) for i in range(count)]
        self.outstanding = 0

    def alloc(self) -> Optional[CommBuffer]:
        if not self._free:
            return None
        self.outstanding += 1
        buf = self._free.pop()
        buf.filled = 0
        return buf

    def free(self, buf: CommBuffer) -> None:
        self.outstanding -= 1
        self._free.append(buf)


class Work:
    """Handle of an asynchronous collective; callbacks run when it is waited for."""

    def __init__(self, fn: Callable[[], None]) -> None:
        self._fn = fn
        self._callbacks: list[Callback] = []
        self.done = False

    def add_done_callback(self, cb: Callback) -> None:
        if self.done:
            cb(self)
        else:
            self._callbacks.append(cb)

    def wait(self) -> None:
        if self.done:
            return
        self._fn()
        self.done = True
        for cb in self._callbacks:
            cb(self)


class Communicator:
    def __init__(self, world: int) -> None:
        self.world = world

    def all_reduce(self, buf: CommBuffer) -> Work:
        def run() -> None:
            for i in range(buf.filled):
                buf.flat[i] /= self.world

        return Work(run)


@dataclass
class Pending:
    work: Work
    buf: CommBuffer
    sink: list[float]


class BucketReducer:
    def __init__(self, pool: CommBufferPool, comm: Communicator) -> None:
        self.pool = pool
        self.comm = comm
        self._pending: list[Pending] = []
        self._current: Optional[CommBuffer] = None
        self.skipped = 0

    def reduce_async(self, grads: Sequence[float], sink: list[float]) -> bool:
        buf = self.pool.alloc()  # clean: travels in Pending, drain frees it
        if buf is None:
            return False
        buf.pack(grads)
        self._pending.append(Pending(self.comm.all_reduce(buf), buf, sink))
        return True

    def drain(self) -> None:
        for item in self._pending:
            item.work.wait()
            item.sink.extend(item.buf.flat[: item.buf.filled])
            self.pool.free(item.buf)
        self._pending.clear()

    def reduce_checked(self, grads: Sequence[float], sink: list[float]) -> bool:
        buf = self.pool.alloc()  # leak: a bucket that does not fit returns False without free
        if buf is None:
            return False
        if not buf.pack(grads):
            log.warning("bucket of %d does not fit", len(grads))
            return False
        work = self.comm.all_reduce(buf)
        work.wait()
        sink.extend(buf.flat[: buf.filled])
        self.pool.free(buf)
        return True

    def reduce_with_callback(self, grads: Sequence[float], sink: list[float]) -> Optional[Work]:
        buf = self.pool.alloc()  # clean: near miss, the closure given to the handle frees it
        if buf is None:
            return None
        buf.pack(grads)

        def finish(_: Work, buf: CommBuffer = buf) -> None:
            sink.extend(buf.flat[: buf.filled])
            self.pool.free(buf)

        work = self.comm.all_reduce(buf)
        work.add_done_callback(finish)
        return work

    def reduce_norm(self, grads: Sequence[float], report: Callable[[float], None]) -> Optional[Work]:
        buf = self.pool.alloc()  # leak: the callback reports the norm and nothing frees the buffer
        if buf is None:
            return None
        buf.pack([g * g for g in grads])

        def finish(_: Work) -> None:
            report(sum(buf.flat[: buf.filled]) ** 0.5)

        work = self.comm.all_reduce(buf)
        work.add_done_callback(finish)
        return work

    def add(self, grads: Sequence[float], sink: list[float]) -> bool:
        """Pack into the open bucket; a full one is sent off and a new one is opened."""
        if self._current is None:
            self._current = self.pool.alloc()  # clean: near miss, flush moves the field into Pending
        if self._current is None:
            return False
        if not self._current.pack(grads):
            self.flush(sink)
            return self.reduce_async(grads, sink)
        return True

    def flush(self, sink: list[float]) -> None:
        buf, self._current = self._current, None
        if buf is None:
            return
        self._pending.append(Pending(self.comm.all_reduce(buf), buf, sink))

    def sync_sparse(self, params: Iterable[Sequence[float]], sink: list[float]) -> int:
        sent = 0
        for grads in params:
            buf = self.pool.alloc()  # leak: all-zero gradients continue with the buffer in hand
            if buf is None:
                self.drain()
                continue
            buf.pack(grads)
            if not any(grads):
                self.skipped += 1
                continue
            self._pending.append(Pending(self.comm.all_reduce(buf), buf, sink))
            sent += 1
        self.drain()
        return sent

    def sync_dense(self, params: Iterable[Sequence[float]], sink: list[float]) -> int:
        sent = 0
        for grads in params:
            if not any(grads):
                self.skipped += 1
                continue
            buf = self.pool.alloc()  # clean: near miss, the skipping continue comes before and a full pool drains first
            if buf is None:
                self.drain()
                buf = self.pool.alloc()  # clean: queued in Pending
                if buf is None:
                    break
            buf.pack(grads)
            self._pending.append(Pending(self.comm.all_reduce(buf), buf, sink))
            sent += 1
        self.drain()
        return sent


class ShardedGather:
    """Send and receive buffers are held for the life of one step."""

    def __init__(self, pool: CommBufferPool) -> None:
        self.pool = pool
        self.send: Optional[CommBuffer] = None
        self.recv: Optional[CommBuffer] = None

    def begin(self) -> bool:
        self.send = self.pool.alloc()  # clean: near miss, freed when recv is missing, else by end
        if self.send is None:
            return False
        self.recv = self.pool.alloc()  # clean: end frees it
        if self.recv is None:
            self.pool.free(self.send)
            self.send = None
            return False
        return True

    def end(self) -> None:
        if self.send is not None:
            self.pool.free(self.send)
            self.send = None
        if self.recv is not None:
            self.pool.free(self.recv)
            self.recv = None

    def step(self, shard: Sequence[float]) -> list[float]:
        if not self.begin():
            return []
        assert self.send is not None and self.recv is not None
        self.send.pack(shard)
        self.recv.pack(self.send.flat[: self.send.filled])
        out = self.recv.flat[: self.recv.filled]
        self.end()
        return out


def broadcast_adapter(pool: CommBufferPool, weights: Sequence[float], ranks: int) -> list[list[float]]:
    replicas: list[list[float]] = []
    buf = pool.alloc()  # leak: the loop rebinds it, only the last one is freed
    for _ in range(ranks):
        if buf is None:
            break
        buf.pack(weights)
        replicas.append(buf.flat[: buf.filled])
        if len(replicas) < ranks:
            buf = pool.alloc()  # leak: rebound in turn on the next pass
    if buf is not None:
        pool.free(buf)
    return replicas


def clip_and_reduce(pool: CommBufferPool, comm: Communicator, grads: Sequence[float], limit: float) -> list[float]:
    buf = pool.alloc()  # clean: freed on both arms
    if buf is None:
        return list(grads)
    buf.pack(grads)
    peak = max((abs(g) for g in grads), default=0.0)
    if peak <= limit:
        comm.all_reduce(buf).wait()
        out = buf.flat[: buf.filled]
        pool.free(buf)
    else:
        out = [g * limit / peak for g in buf.flat[: buf.filled]]
        pool.free(buf)
    return out


def main() -> None:
    pool = CommBufferPool(3, 8)
    red = BucketReducer(pool, Communicator(2))
    sink: list[float] = []
    red.reduce_async([2.0, 4.0], sink)
    red.add([1.0] * 6, sink)
    red.add([3.0] * 6, sink)
    red.flush(sink)
    red.drain()
    work = red.reduce_with_callback([8.0], sink)  # clean: waited for, so its callback frees
    if work is not None:
        work.wait()
    red.sync_dense([[1.0], [0.0], [2.0]], sink)
    ShardedGather(pool).step([1.0, 2.0])
    clip_and_reduce(pool, red.comm, [9.0], 1.0)
    print(sum(sink), "outstanding", pool.outstanding)


if __name__ == "__main__":
    main()
