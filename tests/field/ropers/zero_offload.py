"""CPU offload of partitioned parameters and optimizer state through pinned staging buffers."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional

logger = logging.getLogger(__name__)


@dataclass
class PinnedBuffer:
    index: int
    data: bytearray

    def narrow(self, n: int) -> memoryview:
        return memoryview(self.data)[:n]


class PinnedBufferPool:
    """Fixed number of page-locked buffers of one size."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._free = [PinnedBuffer(i, bytearray(nbytes)) for i in range(count)]
        self._used: Dict[int, PinnedBuffer] = {}

    def acquire(self) -> Optional[PinnedBuffer]:
        with self._lock:
            if not self._free:
                return None
            buf = self._free.pop()
            self._used[buf.index] = buf
            return buf

    def release(self, buf: PinnedBuffer) -> None:
        with self._lock:
            del self._used[buf.index]
            self._free.append(buf)

    @property
    def in_use(self) -> int:
        return len(self._used)


@dataclass
class PartitionedParam:
    pid: int
    shard: bytes
    trainable: bool = True
    dirty: bool = False
    full: Optional[bytes] = None
    grad: Optional[bytes] = None
    exp_avg: bytes = b""
    exp_avg_sq: bytes = b""
    tags: List[str] = field(default_factory=list)


class ParamSwapper:
    """Holds a pinned buffer for every parameter that is resident."""

    def __init__(self, pool: PinnedBufferPool) -> None:
        self.pool = pool
        self.resident: Dict[int, PinnedBuffer] = {}
        self.updated: Dict[int, PinnedBuffer] = {}

    def swap_in(self, param: PartitionedParam) -> PinnedBuffer:
        if param.pid in self.resident:
            return self.resident[param.pid]
        buf = self.pool.acquire()  # clean: stored in resident, swap_out releases
        if buf is None:
            raise RuntimeError(f"no pinned buffer for param {param.pid}")
        buf.narrow(len(param.shard))[:] = param.shard
        self.resident[param.pid] = buf
        return buf

    def refresh(self, params: Iterable[PartitionedParam]) -> int:
        """Upload the shards that the optimizer has touched since the last step."""
        n = 0
        for param in params:
            if not param.dirty:
                continue
            buf = self.pool.acquire()  # leak: the next refresh overwrites the entry of the same pid unreleased
            if buf is None:
                break
            buf.narrow(len(param.shard))[:] = param.shard
            self.updated[param.pid] = buf
            param.dirty = False
            n += 1
        return n

    def prefetch(self, params: Iterable[PartitionedParam]) -> None:
        for param in params:
            if param.pid in self.resident:
                continue
            buf = self.pool.acquire()  # leak: continue for frozen params after the buffer is taken
            if buf is None:
                break
            if not param.trainable and "tied" in param.tags:
                continue
            buf.narrow(len(param.shard))[:] = param.shard
            self.resident[param.pid] = buf

    def swap_out(self, pid: int) -> None:
        buf = self.resident.pop(pid, None)
        if buf is not None:
            self.pool.release(buf)

    def swap_out_all(self) -> None:
        while self.resident:
            _, buf = self.resident.popitem()
            self.pool.release(buf)
        while self.updated:
            _, buf = self.updated.popitem()
            self.pool.release(buf)


class OptimizerOffload:
    def __init__(self, pool: PinnedBufferPool, lr: float = 1e-3) -> None:
        self.pool = pool
        self.lr = lr
        self.skipped = 0

    def load_moments(self, param: PartitionedParam):
        m = self.pool.acquire()  # leak: not rolled back when the second buffer is missing
        if m is None:
            return None
        v = self.pool.acquire()  # clean: returned with m to the caller
        if v is None:
            return None
        m.narrow(len(param.exp_avg))[:] = param.exp_avg
        v.narrow(len(param.exp_avg_sq))[:] = param.exp_avg_sq
        return m, v

    def load_moments_checked(self, param: PartitionedParam):
        m = self.pool.acquire()  # clean: rolled back if v is None, else returned
        v = self.pool.acquire() if m is not None else None  # clean: near miss, only taken when m was, both tested below
        if m is None or v is None:
            if m is not None:
                self.pool.release(m)
            return None
        m.narrow(len(param.exp_avg))[:] = param.exp_avg
        v.narrow(len(param.exp_avg_sq))[:] = param.exp_avg_sq
        return m, v

    def step(self, params: Iterable[PartitionedParam]) -> None:
        for param in params:
            pair = self.load_moments_checked(param)  # clean: near miss, the continue without grad gives both back first
            if pair is None:
                self.skipped += 1
                continue
            m, v = pair
            if param.grad is None:
                self.pool.release(v)
                self.pool.release(m)
                continue
            param.exp_avg = bytes(m.narrow(len(param.exp_avg)))
            param.exp_avg_sq = bytes(v.narrow(len(param.exp_avg_sq)))
            param.dirty = True
            self.pool.release(m)
            self.pool.release(v)

    def moment_norm(self, param: PartitionedParam) -> float:
        pair = self.load_moments(param)  # leak: only m is given back, v is dropped
        if pair is None:
            return 0.0
        m, v = pair
        total = float(sum(m.narrow(len(param.exp_avg)))) + float(sum(v.narrow(len(param.exp_avg_sq))))
        self.pool.release(m)
        return total


class GradReducer:
    def __init__(self, pool: PinnedBufferPool, world_size: int) -> None:
        self.pool = pool
        self.world_size = world_size
        self.overflow = False

    def _flatten(self, grads: List[bytes]) -> Optional[PinnedBuffer]:
        buf = self.pool.acquire()  # clean: returned to the caller
        if buf is None:
            return None
        off = 0
        for g in grads:
            buf.data[off:off + len(g)] = g
            off += len(g)
        return buf

    def reduce(self, grads: List[bytes]) -> Optional[bytes]:
        flat = self._flatten(grads)  # leak: early return on overflow
        if flat is None:
            return None
        total = sum(len(g) for g in grads)
        if any(b == 0xFF for b in flat.narrow(total)):
            self.overflow = True
            return None
        out = bytes(flat.narrow(total))
        self.pool.release(flat)
        return out

    def gather_to_host(self, grads: List[bytes]) -> bytes:
        flat = self._flatten(grads)  # leak: copied out and dropped
        if flat is None:
            return b"".join(grads)
        return bytes(flat.narrow(sum(len(g) for g in grads)))

    def scaled(self, grads: List[bytes], use_pinned: bool) -> bytes:
        flat = self._flatten(grads) if use_pinned else None  # clean: near miss, released under the same test
        n = sum(len(g) for g in grads)
        src = flat.narrow(n) if flat is not None else memoryview(b"".join(grads))
        out = bytes(b // self.world_size for b in src)
        if flat is not None:
            src.release()
            self.pool.release(flat)
        return out


def main() -> None:
    pool = PinnedBufferPool(8, 64)
    params = [PartitionedParam(i, bytes(8), exp_avg=bytes(4), exp_avg_sq=bytes(4)) for i in range(3)]
    swapper = ParamSwapper(pool)
    swapper.swap_in(params[0])  # clean: resident until swap_out_all below
    swapper.prefetch(params)
    OptimizerOffload(pool).step(params)
    reducer = GradReducer(pool, 2)
    reducer.scaled([b"ab", b"cd"], True)
    swapper.swap_out_all()
    logger.info("in use %d", pool.in_use)


if __name__ == "__main__":
    main()
