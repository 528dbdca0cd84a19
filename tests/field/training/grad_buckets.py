import logging
from collections import deque
from typing import Dict, Iterable, List, Optional

import torch
import torch.distributed as dist

log = logging.getLogger("ddp.buckets")


class FlatBufferPool:
    """Fixed number of equally sized flat buffers used for all-reduce."""

    def __init__(self, count: int, numel: int, dtype=torch.float32):
        self._slabs = [torch.zeros(numel, dtype=dtype) for _ in range(count)]
        self._idle = deque(range(count))
        self.numel = numel

    def checkout(self) -> Optional[int]:
        if not self._idle:
            return None
        return self._idle.popleft()

    def checkin(self, slab_id: int) -> None:
        self._idle.append(slab_id)

    def view(self, slab_id: int) -> torch.Tensor:
        return self._slabs[slab_id]


class Bucket:
    def __init__(self, index: int, params: List[torch.nn.Parameter]):
        self.index = index
        self.params = params
        self.slab: Optional[int] = None
        self.spare: Optional[int] = None
        self.work = None

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.params)


class GradReducer:
    def __init__(self, buckets: List[Bucket], pool: FlatBufferPool, group=None):
        self.buckets = buckets
        self.pool = pool
        self.group = group
        self._inflight: Dict[int, int] = {}

    def launch(self, bucket: Bucket) -> bool:
        slab = self.pool.checkout()  # clean: kept in the in-flight table, drained by finish()
        if slab is None:
            return False
        self._inflight[bucket.index] = slab
        flat = self.pool.view(slab)
        self._pack(bucket, flat)
        bucket.work = dist.all_reduce(flat[: bucket.numel], group=self.group, async_op=True)
        return True

    def finish(self) -> None:
        for idx in list(self._inflight):
            bucket = self.buckets[idx]
            bucket.work.wait()
            slab = self._inflight.pop(idx)
            self._unpack(bucket, self.pool.view(slab))
            self.pool.checkin(slab)

    def reduce_blocking(self, bucket: Bucket) -> bool:
        slab = self.pool.checkout()  # leak: the early return for an oversized bucket keeps the slab
        if slab is None:
            return False
        if bucket.numel > self.pool.numel:
            log.error("bucket %d does not fit (%d > %d)", bucket.index, bucket.numel, self.pool.numel)
            return False
        flat = self.pool.view(slab)
        self._pack(bucket, flat)
        dist.all_reduce(flat[: bucket.numel], group=self.group)
        self._unpack(bucket, flat)
        self.pool.checkin(slab)
        return True

    def reduce_pairwise(self, a: Bucket, b: Bucket) -> bool:
        first = self.pool.checkout()  # leak: not rolled back when the second checkout finds nothing
        if first is None:
            return False
        second = self.pool.checkout()  # clean: both go back at the end
        if second is None:
            return False
        for slab, bucket in ((first, a), (second, b)):
            self._pack(bucket, self.pool.view(slab))
            dist.all_reduce(self.pool.view(slab), group=self.group)
            self._unpack(bucket, self.pool.view(slab))
        self.pool.checkin(first)
        self.pool.checkin(second)
        return True

    def norm_pair(self, a: Bucket, b: Bucket) -> Optional[float]:
        first = self.pool.checkout()  # clean: near miss, rolled back when the second one is missing
        if first is None:
            return None
        second = self.pool.checkout()  # clean: returned together with the first
        if second is None:
            self.pool.checkin(first)
            return None
        self._pack(a, self.pool.view(first))
        self._pack(b, self.pool.view(second))
        value = float(self.pool.view(first).norm() + self.pool.view(second).norm())
        self.pool.checkin(second)
        self.pool.checkin(first)
        return value

    def attach(self, bucket: Bucket) -> None:
        bucket.slab = self.pool.checkout()  # leak: overwrites a slab still attached from the last step
        bucket.work = None

    def attach_once(self, bucket: Bucket) -> None:
        if bucket.spare is None:
            bucket.spare = self.pool.checkout()  # clean: near miss, only filled when empty, detach_all gives it back

    def detach_all(self) -> None:
        for bucket in self.buckets:
            if bucket.slab is not None:
                self.pool.checkin(bucket.slab)
                bucket.slab = None
            if bucket.spare is not None:
                self.pool.checkin(bucket.spare)
                bucket.spare = None

    def _pack(self, bucket: Bucket, flat: torch.Tensor) -> None:
        offset = 0
        for p in bucket.params:
            n = p.numel()
            if p.grad is not None:
                flat[offset : offset + n].copy_(p.grad.reshape(-1))
            offset += n

    def _unpack(self, bucket: Bucket, flat: torch.Tensor) -> None:
        offset = 0
        for p in bucket.params:
            n = p.numel()
            if p.grad is not None:
                p.grad.copy_(flat[offset : offset + n].view_as(p.grad))
            offset += n


def sync_all(reducer: GradReducer, order: Iterable[int]) -> int:
    pending = 0
    for idx in order:
        if not reducer.launch(reducer.buckets[idx]):
            reducer.finish()
            reducer.launch(reducer.buckets[idx])
        pending += 1
    reducer.finish()
    return pending


def run_static_plan(reducer: GradReducer, steps: int) -> None:
    for _ in range(steps):
        for bucket in reducer.buckets:
            reducer.attach(bucket)
        for bucket in reducer.buckets:
            reducer._pack(bucket, reducer.pool.view(bucket.slab))
    reducer.detach_all()
