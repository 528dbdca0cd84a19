"""Gradient bucketing and overlapped all-reduce for data-parallel training."""
from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple


class Bucket:
    __slots__ = ("storage", "used", "dtype")

    def __init__(self, capacity: int, dtype: str) -> None:
        self.storage: List[float] = [0.0] * capacity
        self.used = 0
        self.dtype = dtype

    def append(self, values: Sequence[float]) -> int:
        start = self.used
        self.storage[start : start + len(values)] = values
        self.used += len(values)
        return start

    def view(self) -> List[float]:
        return self.storage[: self.used]


class BucketPool:
    def __init__(self, capacity: int, limit: int) -> None:
        self.capacity = capacity
        self._limit = limit
        self._made = 0
        self._spare: Dict[str, List[Bucket]] = {}
        self._lock = threading.Lock()

    def take(self, dtype: str = "fp32") -> Bucket:
        with self._lock:
            spare = self._spare.setdefault(dtype, [])
            if spare:
                return spare.pop()
            if self._made >= self._limit:
                raise RuntimeError("bucket limit reached")
            self._made += 1
        return Bucket(self.capacity, dtype)

    def put_back(self, bucket: Bucket) -> None:
        bucket.used = 0
        with self._lock:
            self._spare[bucket.dtype].append(bucket)

    def take_pair(self, dtype: str) -> Tuple[Bucket, Bucket]:
        """A working bucket and its fp32 master."""
        low = self.take(dtype)  # clean: handed out in the pair, or rolled back
        try:
            high = self.take("fp32")  # clean: handed out in the pair
        except RuntimeError:
            self.put_back(low)
            raise
        return low, high

    def take_many(self, n: int, dtype: str = "fp32") -> Optional[List[Bucket]]:
        got: List[Bucket] = []
        for _ in range(n):
            try:
                got.append(self.take(dtype))  # leak: the ones already in got are dropped when a later take fails
            except RuntimeError:
                return None
        return got

    def put_many(self, buckets: Sequence[Bucket]) -> None:
        for b in buckets:
            self.put_back(b)

    @property
    def missing(self) -> int:
        with self._lock:
            return self._made - sum(len(s) for s in self._spare.values())


AllReduce = Callable[[List[float]], List[float]]


class Reducer:
    """Fills buckets in reverse parameter order and reduces each as it gets full."""

    def __init__(self, pool: BucketPool, all_reduce: AllReduce, world: int) -> None:
        self._pool = pool
        self._all_reduce = all_reduce
        self._world = world
        self._open: Optional[Bucket] = None
        self._pending: List[Bucket] = []
        self._extra: Dict[str, Bucket] = {}
        self.require_sync = True

    def mark_ready(self, grad: Sequence[float]) -> None:
        if self._open is not None and self._open.used + len(grad) > self._pool.capacity:
            self._pending.append(self._open)
            self._open = None
        if self._open is None:
            self._open = self._pool.take()  # clean: moved to _pending when full, put back by finalize
        self._open.append(grad)

    def add_named(self, name: str, grad: Sequence[float]) -> None:
        """Parameters that must not share a bucket (embeddings, routers)."""
        bucket = self._pool.take()  # leak: tied parameters report twice and the first entry is overwritten
        bucket.append(grad)
        self._extra[name] = bucket

    def finalize(self) -> List[List[float]]:
        if self._open is not None:
            self._pending.append(self._open)
            self._open = None
        reduced = []
        while self._pending:
            bucket = self._pending.pop(0)
            reduced.append([v / self._world for v in self._all_reduce(bucket.view())])
            self._pool.put_back(bucket)
        for name in list(self._extra):
            bucket = self._extra.pop(name)
            reduced.append(self._all_reduce(bucket.view()))
            self._pool.put_back(bucket)
        return reduced

    @contextmanager
    def no_sync(self) -> Iterator[Bucket]:
        prev, self.require_sync = self.require_sync, False
        scratch = self._pool.take()  # clean: put back in the finally of the context manager
        try:
            yield scratch
        finally:
            self._pool.put_back(scratch)
            self.require_sync = prev


def flatten(pool: BucketPool, grads: Sequence[Sequence[float]], out: Optional[Bucket] = None) -> float:
    """Squared norm of the concatenated gradients; ``out`` may be lent by the caller."""
    owned = out is None
    if out is None:
        out = pool.take()  # clean: near miss, put back exactly when owned
    for g in grads:
        out.append(g)
    total = sum(v * v for v in out.view())
    if owned:
        pool.put_back(out)
    return total


def clip(pool: BucketPool, grads: Sequence[Sequence[float]], max_norm: float, scratch: Optional[Bucket] = None) -> float:
    owned = False
    if scratch is None:
        scratch = pool.take()  # leak: owned is never set, so the branch below does not put it back
    norm = math.sqrt(flatten(pool, grads, scratch))
    if norm > max_norm:
        for i, v in enumerate(scratch.view()):
            scratch.storage[i] = v * max_norm / norm
    if owned:
        pool.put_back(scratch)
    return norm


def reduce_mixed(pool: BucketPool, grads: Sequence[Sequence[float]], dtype: str, keep_master: bool) -> Optional[Bucket]:
    low, high = pool.take_pair(dtype)  # clean: low put back, high returned or put back by keep_master
    for g in grads:
        low.append(g)
    high.append(low.view())
    pool.put_back(low)
    if keep_master:
        return high
    pool.put_back(high)
    return None


def step_with_master(pool: BucketPool, grads: Sequence[Sequence[float]], lr: float) -> List[float]:
    master = reduce_mixed(pool, grads, "bf16", keep_master=True)  # clean: put back after the update is computed
    assert master is not None
    update = [-lr * v for v in master.view()]
    pool.put_back(master)
    return update


def log_master(pool: BucketPool, grads: Sequence[Sequence[float]]) -> str:
    master = reduce_mixed(pool, grads, "bf16", True)  # leak: only its maximum is read, the bucket is dropped
    peak = max(master.view(), default=0.0)
    return f"grad peak {peak:.3e}"


def scatter_to_groups(pool: BucketPool, grads: Sequence[Sequence[float]], groups: int) -> List[float]:
    buckets = pool.take_many(groups)  # clean: None or put back by put_many
    if buckets is None:
        return []
    for i, g in enumerate(grads):
        buckets[i % groups].append(g)
    sums = [sum(b.view()) for b in buckets]
    pool.put_many(buckets)
    return sums


def main() -> None:
    pool = BucketPool(16, 12)
    red = Reducer(pool, lambda v: list(v), world=2)
    for _ in range(5):
        red.mark_ready([1.0] * 6)
    red.finalize()
    with red.no_sync() as scratch:  # clean: context manager puts the bucket back
        scratch.append([1.0])
    flatten(pool, [[1.0], [2.0]])
    step_with_master(pool, [[1.0]], 0.1)
    scatter_to_groups(pool, [[1.0]] * 4, 3)
    assert pool.missing == 0, pool.missing
    red.add_named("emb", [1.0])
    red.add_named("emb", [1.0])
    red.finalize()
    clip(pool, [[3.0]], 1.0), log_master(pool, [[1.0]])
    print(pool.missing)


if __name__ == "__main__":
    main()
