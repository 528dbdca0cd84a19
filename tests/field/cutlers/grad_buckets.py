"""Gradient bucketing for data-parallel training over a pool of communication buffers."""
from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Iterable, Optional


class CollectiveTimeout(RuntimeError):
    pass


class CommBufferPool:
    """Registered buffers: lend() takes one out, restore() puts it back."""

    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._sem = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._bufs = [[0.0] * numel for _ in range(count)]
        self._closed = False

    def lend(self) -> list[float]:
        self._sem.acquire()  # clean: near miss, put back before the raise; else restore releases it with the buffer
        with self._lock:
            if self._closed:
                self._sem.release()
                raise RuntimeError("pool closed")
            return self._bufs.pop()

    def lend_nowait(self) -> Optional[list[float]]:
        if not self._sem.acquire(blocking=False):  # leak: the permit is not put back when the pool turns out closed
            return None
        with self._lock:
            if self._closed:
                return None
            return self._bufs.pop()

    def restore(self, buf: list[float]) -> None:
        with self._lock:
            self._bufs.append(buf)
        self._sem.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True


@dataclass(eq=False)
class Param:
    name: str
    grad: Optional[list[float]] = None
    sparse: bool = False


@dataclass(eq=False)
class Bucket:
    buf: Optional[list[float]] = None
    fill: int = 0
    members: list[tuple[Param, int]] = field(default_factory=list)
    owns_buf: bool = False


class ProcessGroup:
    def __init__(self, world: int) -> None:
        self.world = world
        self._exec = ThreadPoolExecutor(max_workers=2)

    def all_reduce(self, buf: list[float]) -> "Future[None]":
        def work() -> None:
            for i in range(len(buf)):
                buf[i] *= self.world
        return self._exec.submit(work)

    def shutdown(self) -> None:
        self._exec.shutdown(wait=True)


class BucketReducer:
    def __init__(self, pool: CommBufferPool, pg: ProcessGroup) -> None:
        self.pool = pool
        self.pg = pg
        self.current = Bucket()
        self.flying: list[tuple[Bucket, "Future[None]"]] = []
        self._norm_buf: Optional[list[float]] = None

    def _open_bucket(self) -> Bucket:
        return Bucket(buf=self.pool.lend(), owns_buf=True)  # clean: moved into the bucket that is returned

    def add(self, p: Param) -> None:
        if p.grad is None:
            return
        n = len(p.grad)
        if self.current.buf is None:
            self.current = self._open_bucket()  # clean: near miss, replaces a bucket without a buffer; launch hands it on
        elif self.current.fill + n > self.pool.numel:
            self.launch()
            self.current = self._open_bucket()  # clean: near miss, launch has moved the former bucket to flying
        b = self.current
        b.buf[b.fill:b.fill + n] = p.grad
        b.members.append((p, b.fill))
        b.fill += n

    def launch(self) -> None:
        b, self.current = self.current, Bucket()
        if b.buf is None:
            return
        self.flying.append((b, self.pg.all_reduce(b.buf)))

    def synchronize(self) -> None:
        self.launch()
        for b, fut in self.flying:
            fut.result()
            for p, off in b.members:
                p.grad = b.buf[off:off + len(p.grad)]
            self.pool.restore(b.buf)
            b.buf = None
        self.flying.clear()

    def reduce_sparse(self, params: Iterable[Param]) -> int:
        n = 0
        for p in params:
            buf = self.pool.lend()  # leak: a dense or missing gradient continues without restore
            if not p.sparse or p.grad is None:
                continue
            buf[:len(p.grad)] = p.grad
            self.pg.all_reduce(buf).result()
            p.grad = buf[:len(p.grad)]
            self.pool.restore(buf)
            n += 1
        return n

    def reduce_async(self, p: Param, on_done: Callable[[Param], None]) -> None:
        buf = self.pool.lend()  # clean: near miss, the future's callback restores it
        n = len(p.grad)
        buf[:n] = p.grad

        def finish(_: "Future[None]") -> None:
            p.grad = buf[:n]
            self.pool.restore(buf)
            on_done(p)

        self.pg.all_reduce(buf).add_done_callback(finish)

    def reduce_async_checked(self, p: Param, on_done: Callable[[Param], None]) -> None:
        buf = self.pool.lend()  # leak: the callback leaves early on a non-finite sum
        n = len(p.grad)
        buf[:n] = p.grad

        def finish(_: "Future[None]") -> None:
            if any(x != x for x in buf[:n]):
                p.grad = None
                return
            p.grad = buf[:n]
            self.pool.restore(buf)
            on_done(p)

        self.pg.all_reduce(buf).add_done_callback(finish)

    def reduce_with_timeout(self, p: Param, timeout: float) -> bool:
        buf = self.pool.lend()  # leak: the caught timeout returns False and the buffer stays out
        buf[:len(p.grad)] = p.grad
        try:
            self._wait(self.pg.all_reduce(buf), timeout)
        except CollectiveTimeout:
            p.grad = None
            return False
        p.grad = buf[:len(p.grad)]
        self.pool.restore(buf)
        return True

    @staticmethod
    def _wait(fut: "Future[None]", timeout: float) -> None:
        try:
            fut.result(timeout)
        except TimeoutError as e:
            raise CollectiveTimeout() from e

    def grad_norm(self, params: list[Param]) -> float:
        if self._norm_buf is None:
            self._norm_buf = self.pool.lend()  # clean: near miss, lent once and kept; teardown restores it
        buf = self._norm_buf
        for i, p in enumerate(params):
            buf[i] = sum(g * g for g in p.grad or ())
        return sum(buf[:len(params)]) ** 0.5

    def fp16_compress(self, p: Param, residual: Optional[Param]) -> Optional[list[float]]:
        main = self.pool.lend_nowait()  # leak: lost when the residual's buffer cannot be had
        if main is None:
            return None
        res = None
        if residual is not None:
            res = self.pool.lend_nowait()  # clean: near miss, restored under the test for None
            if res is None:
                return None
            res[:len(residual.grad)] = residual.grad
        main[:len(p.grad)] = p.grad
        out = [m + (res[i] if res is not None else 0.0) for i, m in enumerate(main[:len(p.grad)])]
        if res is not None:
            self.pool.restore(res)
        self.pool.restore(main)
        return out

    def teardown(self) -> None:
        self.synchronize()
        if self._norm_buf is not None:
            self.pool.restore(self._norm_buf)
            self._norm_buf = None


class ZeroShardGather:
    """All-gathers a shard; owns_buf says whether the view's buffer is ours to restore."""

    def __init__(self, pool: CommBufferPool) -> None:
        self.pool = pool
        self.views: dict[str, Bucket] = {}

    def gather(self, name: str, shared: Optional[list[float]] = None) -> Bucket:
        self.release(name)
        if shared is not None:
            b = Bucket(buf=shared, owns_buf=False)
        else:
            b = Bucket(buf=self.pool.lend(), owns_buf=True)  # clean: near miss, owns_buf is set and release looks at it
        self.views[name] = b
        return b

    def release(self, name: str) -> None:
        b = self.views.pop(name, None)
        if b is not None and b.owns_buf:
            self.pool.restore(b.buf)

    def gather_tied(self, name: str, tied: str) -> Bucket:
        b = Bucket(buf=self.pool.lend())  # leak: owns_buf stays False, so release passes it by
        self.release(name)
        self.views[name] = b
        return b
