"""Bucketed gradient all-reduce with deferred completion."""
import time
from typing import Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from .registry import Bucket, BucketRegistry


class Pending:
    def __init__(self, bucket: Bucket, work, views: List[Tuple[torch.Tensor, int]]):
        self.bucket = bucket
        self.work = work
        self.views = views

    def complete(self) -> None:
        self.work.wait()
        for grad, off in self.views:
            grad.copy_(self.bucket.flat[off : off + grad.numel()].view_as(grad))
        self.bucket.release()


class Reducer:
    def __init__(self, reg: BucketRegistry, bucket_numel: int, group=None):
        self.reg = reg
        self.bucket_numel = bucket_numel
        self.group = group
        self.pending: List[Pending] = []
        self._cur: Optional[Bucket] = None
        self._views: List[Tuple[torch.Tensor, int]] = []
        self._aux: Dict[str, Bucket] = {}

    def on_grad(self, grad: torch.Tensor) -> None:
        if self._cur is None:
            self._cur = self.reg.obtain_or_larger(self.bucket_numel)  # clean: near miss, _launch moves it to pending
            if self._cur is None:
                dist.all_reduce(grad, group=self.group)
                return
        off = self._cur.fill
        if self._cur.add(grad):
            self._views.append((grad, off))
            return
        self._launch()
        dist.all_reduce(grad, group=self.group)

    def _launch(self) -> None:
        bucket, self._cur = self._cur, None
        views, self._views = self._views, []
        work = dist.all_reduce(bucket.flat[: bucket.fill], group=self.group, async_op=True)
        self.pending.append(Pending(bucket, work, views))

    def finish(self) -> None:
        if self._cur is not None:
            self._launch()
        for p in self.pending:
            p.complete()
        self.pending.clear()
        for b in self._aux.values():
            b.release()
        self._aux.clear()

    def reduce_now(self, grads: List[torch.Tensor]) -> int:
        n = sum(g.numel() for g in grads)
        bucket = self.reg.obtain_zeroed(n)  # leak: released on a single rank only, not after the collective
        if bucket is None:
            return 0
        for g in grads:
            bucket.add(g)
        if dist.get_world_size(self.group) == 1:
            bucket.release()
            return n
        dist.all_reduce(bucket.flat[:n], group=self.group)
        off = 0
        for g in grads:
            g.copy_(bucket.flat[off : off + g.numel()].view_as(g))
            off += g.numel()
        return n

    def sum_scalars(self, values: Dict[str, float]) -> Dict[str, float]:
        bucket = self.reg.obtain(1024)  # clean: released before the dict is built
        if bucket is None:
            return dict(values)
        keys = sorted(values)
        for i, k in enumerate(keys):
            bucket.flat[i] = values[k]
        dist.all_reduce(bucket.flat[: len(keys)], group=self.group)
        host = bucket.flat[: len(keys)].tolist()
        bucket.release()
        return dict(zip(keys, host))

    def aux(self, name: str, numel: int) -> Optional[Bucket]:
        """Named bucket, borrowed from the reducer until finish()."""
        if name not in self._aux:
            b = self.reg.obtain_or_larger(numel)  # clean: kept in _aux, finish releases it
            if b is None:
                return None
            self._aux[name] = b
        return self._aux[name]

    def swap_aux(self, name: str, numel: int) -> bool:
        fresh = self.reg.obtain(numel)  # clean: near miss, the replaced bucket is released, this one by finish
        if fresh is None:
            return False
        old = self._aux.get(name)
        self._aux[name] = fresh
        if old is not None:
            old.release()
        return True

    def rename_aux(self, old: str, new: str) -> bool:
        if old not in self._aux or new in self._aux:
            return False
        self._aux[new] = self._aux.pop(old)
        return True


class TracedReducer(Reducer):
    """Records per-bucket timings; keeps a shadow bucket to compare against."""

    def __init__(self, reg, bucket_numel, group=None, on_time: Optional[Callable[[float], None]] = None):
        super().__init__(reg, bucket_numel, group)
        self.on_time = on_time
        self.shadow = reg.obtain_zeroed(bucket_numel)  # leak: the overriding finish never releases the shadow
        self.spot = reg.obtain(1024)  # clean: near miss, released by the overriding finish
        self.times: List[float] = []

    def _launch(self) -> None:
        t0 = time.perf_counter()
        if self.shadow is not None and self._cur is not None:
            n = min(self._cur.fill, self.shadow.flat.numel())
            self.shadow.flat[:n].copy_(self._cur.flat[:n])
        super()._launch()
        self.times.append(time.perf_counter() - t0)

    def finish(self) -> None:
        super().finish()
        if self.on_time is not None and self.times:
            self.on_time(sum(self.times) / len(self.times))
        self.times.clear()
        self.shadow = None
        if self.spot is not None:
            self.spot.release()
            self.spot = None


def pick_smaller(reg: BucketRegistry, a: int, b: int) -> Optional[Bucket]:
    """Bucket for the smaller request that can be had; the caller releases it."""
    left = reg.obtain(a)  # leak: dropped when the right one is preferred
    right = reg.obtain(b)  # clean: released when the left one is returned, else returned itself
    if left is None:
        return right
    if right is None:
        return left
    if left.cls <= right.cls:
        right.release()
        return left
    return right


def pick_larger(reg: BucketRegistry, a: int, b: int) -> Optional[Bucket]:
    left = reg.obtain(a)  # clean: near miss, the loser of the comparison is released
    right = reg.obtain(b)  # clean: near miss, the loser of the comparison is released
    if left is None or right is None:
        return left or right
    win, lose = (left, right) if left.cls >= right.cls else (right, left)
    lose.release()
    return win
