"""Gradient bucketing for data-parallel training: communication buffers and async reduce handles."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Optional

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = dist = None


class CommBuffers:
    """Stack of equally sized flat buffers. Exhaustion raises."""

    class Exhausted(Exception):
        pass

    def __init__(self, n: int, numel: int, make: Optional[Callable[[int], Any]] = None) -> None:
        make = make or (torch.empty if torch is not None else (lambda k: [0.0] * k))
        self._stack = [make(numel) for _ in range(n)]
        self._out: Dict[int, Any] = {}

    def get_buffer(self) -> Any:
        if not self._stack:
            raise CommBuffers.Exhausted()
        buf = self._stack.pop()
        self._out[id(buf)] = buf
        return buf

    def put_buffer(self, buf: Any) -> None:
        self._stack.append(self._out.pop(id(buf)))

    @property
    def idle(self) -> int:
        return len(self._stack)


@dataclass
class Bucket:
    index: int
    buf: Any = None
    filled: int = 0
    work: Any = None
    params: List[Any] = field(default_factory=list)


class Reducer:
    def __init__(self, pool: CommBuffers, comm: Any, bucket_numel: int) -> None:
        self.pool = pool
        self.comm = comm
        self.bucket_numel = bucket_numel
        self.current: Optional[Bucket] = None
        self.pending: List[Bucket] = []
        self.no_sync = False

    def add_grad(self, param: Any) -> None:
        n = param.numel()
        if self.current is None or self.current.filled + n > self.bucket_numel:
            self.flush()
            self.current = Bucket(len(self.pending), self.pool.get_buffer())  # clean: moves with the bucket to pending
        b = self.current
        param.copy_into(b.buf, b.filled)
        b.filled += n
        b.params.append(param)

    def flush(self) -> None:
        if self.current is None:
            return
        bucket, self.current = self.current, None
        if bucket.filled == 0:
            self.pool.put_buffer(bucket.buf)
            return
        bucket.work = self.comm.all_reduce_async(bucket.buf, bucket.filled)
        self.pending.append(bucket)

    def wait_all(self) -> None:
        self.flush()
        for bucket in self.pending:
            bucket.work.wait()
            offset = 0
            for p in bucket.params:
                p.copy_from(bucket.buf, offset)
                offset += p.numel()
            self.pool.put_buffer(bucket.buf)
        self.pending.clear()

    def reduce_if_finite(self, grads: List[float]) -> Optional[List[float]]:
        buf = self.pool.get_buffer()  # leak: non-finite gradient returns None with the buffer out
        for i, g in enumerate(grads):
            if g != g:
                return None
            buf[i] = g
        self.comm.all_reduce(buf, len(grads))
        out = [float(x) for x in buf[: len(grads)]]
        self.pool.put_buffer(buf)
        return out

    def reduce_unless_no_sync(self, grads: List[float]) -> List[float]:
        buf = None
        if not self.no_sync:
            buf = self.pool.get_buffer()  # clean: near miss, put back under `buf is not None`
            for i, g in enumerate(grads):
                buf[i] = g
            self.comm.all_reduce(buf, len(grads))
        out = list(buf[: len(grads)]) if buf is not None else list(grads)
        if buf is not None:
            self.pool.put_buffer(buf)
        return out

    def broadcast_from(self, rank: int, params: Iterable[Any]) -> int:
        sent = 0
        for p in params:
            buf = self.pool.get_buffer()  # leak: frozen params `continue` with the buffer
            p.copy_into(buf, 0)
            if not p.requires_grad:
                continue
            self.comm.broadcast(buf, p.numel(), rank)
            p.copy_from(buf, 0)
            self.pool.put_buffer(buf)
            sent += 1
        return sent

    def gather_pair(self, a: List[float], b: List[float]) -> Optional[List[float]]:
        try:
            left = self.pool.get_buffer()  # leak: Exhausted on the second is caught, left is not rolled back
            right = self.pool.get_buffer()  # clean: put back on the only way that has it
        except CommBuffers.Exhausted:
            return None
        for i, (x, y) in enumerate(zip(a, b)):
            left[i], right[i] = x, y
        out = [left[i] + right[i] for i in range(min(len(a), len(b)))]
        self.pool.put_buffer(left)
        self.pool.put_buffer(right)
        return out

    def gather_triple(self, rows: List[List[float]]) -> Optional[List[float]]:
        held: List[Any] = []
        try:
            for _ in range(3):
                held.append(self.pool.get_buffer())  # clean: near miss, list walked in the finally
            for buf, row in zip(held, rows):
                for i, x in enumerate(row):
                    buf[i] = x
            return [sum(col) for col in zip(*(b[: len(rows[0])] for b in held))]
        except CommBuffers.Exhausted:
            return None
        finally:
            for buf in held:
                self.pool.put_buffer(buf)


class ShardedOptimizer:
    """Keeps one staging buffer per group between `prepare` and `finish`."""

    def __init__(self, pool: CommBuffers, comm: Any) -> None:
        self.pool = pool
        self.comm = comm
        self.staging: Dict[str, Any] = {}
        self.error_feedback: Dict[str, Any] = {}

    def prepare(self, group: str) -> Any:
        if group not in self.staging:
            self.staging[group] = self.pool.get_buffer()  # clean: kept by group, put in finish
        return self.staging[group]

    def finish(self, group: str) -> None:
        self.pool.put_buffer(self.staging.pop(group))

    def compress(self, group: str, grads: List[float]) -> List[int]:
        """1-bit compression; the residual stays for the next step."""
        residual = self.pool.get_buffer()  # leak: last step's residual in error_feedback is overwritten each step
        for i, g in enumerate(grads):
            residual[i] = g - (1.0 if g > 0 else -1.0)
        self.error_feedback[group] = residual
        return [int(g > 0) for g in grads]

    def reset_feedback(self) -> None:
        for buf in self.error_feedback.values():
            self.pool.put_buffer(buf)
        self.error_feedback.clear()

    def flat_norm(self, grads: List[float], defer: bool) -> Any:
        buf = self.pool.get_buffer()  # clean: near miss, deferred buffers belong to the caller who gets them
        total = 0.0
        for i, g in enumerate(grads):
            buf[i] = g
            total += g * g
        if defer:
            return buf, total
        self.pool.put_buffer(buf)
        return None, total

    def norms(self, groups: List[List[float]]) -> float:
        acc = 0.0
        for grads in groups:
            _, total = self.flat_norm(grads, defer=True)  # leak: deferred buffer is thrown away with `_`
            acc += total
        return acc ** 0.5

    def quick_norm(self, grads: List[float]) -> float:
        _, total = self.flat_norm(grads, defer=False)  # clean: near miss, not deferred, nothing comes back
        return total ** 0.5
