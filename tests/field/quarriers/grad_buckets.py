"""Gradient bucketing with pooled communication buffers."""
from __future__ import annotations

import logging
from typing import Any, Callable, Iterator, Optional

log = logging.getLogger(__name__)


class CommTimeout(RuntimeError):
    pass


class CommBuffer:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.data = [0.0] * numel

    def copy(self) -> list[float]:
        return list(self.data)


class CommBufferPool:
    def __init__(self) -> None:
        self._bufs: dict[int, list[CommBuffer]] = {}
        self.out = 0

    def get_buffer(self, numel: int) -> CommBuffer:
        self.out += 1
        spare = self._bufs.get(numel)
        return spare.pop() if spare else CommBuffer(numel)

    def put_buffer(self, buf: CommBuffer) -> None:
        self.out -= 1
        self._bufs.setdefault(buf.numel, []).append(buf)


class Reducer:
    def __init__(self, pool: CommBufferPool, allreduce: Callable[[CommBuffer, Callable[[], None]], Any]) -> None:
        self.pool = pool
        self.allreduce = allreduce
        self._pending: dict[int, CommBuffer] = {}
        self._residual: dict[int, CommBuffer] = {}

    def _padded(self, numel: int) -> CommBuffer:
        return self.pool.get_buffer(-(-numel // 64) * 64)  # clean: returned

    def flatten(self, grads: list[list[float]]) -> CommBuffer:
        """The result is a pooled buffer; give it to pool.put_buffer."""
        buf = self._padded(sum(map(len, grads)))  # clean: returned
        i = 0
        for g in grads:
            buf.data[i:i + len(g)] = g
            i += len(g)
        return buf

    def local_norm(self, grads: list[list[float]]) -> float:
        flat = self.flatten(grads).copy()  # leak: only the copy is kept of the pooled buffer
        return sum(x * x for x in flat) ** 0.5

    def max_abs(self, grads: list[list[float]]) -> float:
        buf = self.flatten(grads)  # clean: put back after the value is taken
        value = max(map(abs, buf.data), default=0.0)
        self.pool.put_buffer(buf)
        return value

    def reduce_async(self, grads: list[list[float]]) -> None:
        buf = self.flatten(grads)  # clean: near miss, the completion callback puts it back

        def done() -> None:
            self.pool.put_buffer(buf)

        self.allreduce(buf, done)

    def reduce_deferred(self, bucket: int, grads: list[list[float]]) -> None:
        if bucket in self._pending:
            self.wait(bucket)
        self._pending[bucket] = self.flatten(grads)  # clean: wait puts it back

    def wait(self, bucket: int) -> Optional[list[float]]:
        buf = self._pending.pop(bucket, None)
        if buf is None:
            return None
        out = buf.copy()
        self.pool.put_buffer(buf)
        return out

    def store_residual(self, bucket: int, grads: list[list[float]]) -> None:
        """Error feedback for the next step."""
        self._residual[bucket] = self.flatten(grads)  # leak: the last step's residual is overwritten

    def clear_residuals(self) -> None:
        for buf in self._residual.values():
            self.pool.put_buffer(buf)
        self._residual.clear()

    def reduce_sync(self, grads: list[list[float]], retries: int = 3) -> Optional[list[float]]:
        for attempt in range(retries):
            buf = self.flatten(grads)  # clean: near miss, each attempt puts its own back
            try:
                self.allreduce(buf, lambda: None)
            except CommTimeout:
                self.pool.put_buffer(buf)
                log.warning("allreduce attempt %d timed out", attempt)
                continue
            out = buf.copy()
            self.pool.put_buffer(buf)
            return out
        return None

    def chunks(self, grads: list[list[float]], size: int) -> Iterator[CommBuffer]:
        """Yields pooled buffers, which belong to the consumer."""
        for g in grads:
            for i in range(0, len(g), size):
                buf = self.pool.get_buffer(size)  # clean: yielded to the consumer
                part = g[i:i + size]
                buf.data[:len(part)] = part
                yield buf

    def reduce_chunked(self, grads: list[list[float]], size: int) -> int:
        sent = 0
        for buf in self.chunks(grads, size):  # leak: chunks of zeros are skipped without put_buffer
            if not any(buf.data):
                continue
            self.allreduce(buf, lambda: None)
            self.pool.put_buffer(buf)
            sent += 1
        return sent

    def count_chunks(self, grads: list[list[float]], size: int) -> int:
        n = 0
        for buf in self.chunks(grads, size):  # clean: each put back
            n += 1
            self.pool.put_buffer(buf)
        return n


class CompressedReducer(Reducer):
    def compress(self, grads: list[list[float]], k: int) -> tuple[CommBuffer, CommBuffer]:
        dense = self.flatten(grads)  # leak: a k of the full size or more returns with dense still out
        values = self._padded(k)  # clean: returned
        index = self._padded(k)  # clean: returned
        top = sorted(range(dense.numel), key=lambda i: -abs(dense.data[i]))[:k]
        for j, i in enumerate(top):
            values.data[j] = dense.data[i]
            index.data[j] = float(i)
        if k >= dense.numel:
            return values, index
        self.pool.put_buffer(dense)
        return values, index

    def reduce_topk(self, grads: list[list[float]], k: int) -> list[float]:
        values, index = self.compress(grads, k)  # clean: both put back
        out = values.copy()
        self.pool.put_buffer(values)
        self.pool.put_buffer(index)
        return out

    def preview_topk(self, grads: list[list[float]], k: int) -> list[float]:
        values, _ = self.compress(grads, k)  # leak: the index buffer is discarded
        out = values.copy()
        self.pool.put_buffer(values)
        return out


if __name__ == "__main__":
    p = CommBufferPool()
    r = CompressedReducer(p, lambda b, done: done())
    g = [[1.0, 2.0], [3.0]]
    r.reduce_async(g)
    r.reduce_deferred(0, g)
    r.reduce_deferred(0, g)
    assert r.wait(0)[:3] == [1.0, 2.0, 3.0]
    assert r.reduce_topk(g, 2)[:2] == [3.0, 2.0]
    assert r.reduce_sync(g) and r.count_chunks(g, 2) == 2
    assert p.out == 0, p.out
