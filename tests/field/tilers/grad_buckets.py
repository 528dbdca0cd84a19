"""Gradient bucket reduction; buckets come back from completion callbacks."""
from __future__ import annotations

import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple

Grad = List[float]


class Bucket:
    def __init__(self, index: int, numel: int) -> None:
        self.index = index
        self.numel = numel
        self.flat: List[float] = []

    def load(self, grads: Sequence[Grad]) -> None:
        self.flat = [g for grad in grads for g in grad]

    def unload(self, grads: Sequence[Grad], scale: float) -> None:
        it = iter(self.flat)
        for grad in grads:
            grad[:] = [next(it) * scale for _ in grad]


class BucketPool:
    def __init__(self, count: int, numel: int) -> None:
        self._cv = threading.Condition()
        self._ready: List[Bucket] = [Bucket(i, numel) for i in range(count)]
        self.count = count

    def obtain(self) -> Bucket:
        with self._cv:
            self._cv.wait_for(lambda: bool(self._ready))
            return self._ready.pop()

    def recycle(self, bucket: Bucket) -> None:
        with self._cv:
            self._ready.append(bucket)
            self._cv.notify()

    @property
    def idle(self) -> int:
        return len(self._ready)


class Communicator:
    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size
        self._exec = ThreadPoolExecutor(2)

    def all_reduce(self, bucket: Bucket) -> "Future[Bucket]":
        return self._exec.submit(lambda: bucket)

    def close(self) -> None:
        self._exec.shutdown(wait=True)


class BucketReducer:
    def __init__(self, pool: BucketPool, comm: Communicator) -> None:
        self.pool = pool
        self.comm = comm
        self.failures = 0
        self.done_order: List[int] = []
        self.require_sync = True
        self._inflight: Deque[Tuple[Future, Bucket, Sequence[Grad]]] = deque()
        self._by_group: Dict[int, Bucket] = {}

    def reduce_async(self, grads: Sequence[Grad]) -> Future:
        bucket = self.pool.obtain()  # clean: near miss, the completion callback recycles it
        bucket.load(grads)
        fut = self.comm.all_reduce(bucket)
        fut.add_done_callback(lambda _f: self.pool.recycle(bucket))
        return fut

    def reduce_averaged(self, grads: Sequence[Grad]) -> Future:
        bucket = self.pool.obtain()  # leak: the callback returns early when the all-reduce failed
        bucket.load(grads)
        fut = self.comm.all_reduce(bucket)

        def on_done(f: Future) -> None:
            if f.exception() is not None:
                self.failures += 1
                return
            bucket.unload(grads, 1.0 / self.comm.world_size)
            self.pool.recycle(bucket)

        fut.add_done_callback(on_done)
        return fut

    def _finish(self, bucket: Bucket, grads: Sequence[Grad], fut: Future) -> None:
        if fut.exception() is None:
            bucket.unload(grads, 1.0 / self.comm.world_size)
        else:
            self.failures += 1
        self.pool.recycle(bucket)

    def reduce_bound(self, grads: Sequence[Grad]) -> Future:
        bucket = self.pool.obtain()  # clean: near miss, bound into _finish, which recycles on both outcomes
        bucket.load(grads)
        fut = self.comm.all_reduce(bucket)
        fut.add_done_callback(partial(self._finish, bucket, grads))
        return fut

    def _record(self, index: int, fut: Future) -> None:
        self.done_order.append(index)

    def reduce_ordered(self, grads: Sequence[Grad]) -> Future:
        bucket = self.pool.obtain()  # leak: the callback is given the index only and nobody recycles the bucket
        bucket.load(grads)
        fut = self.comm.all_reduce(bucket)
        fut.add_done_callback(partial(self._record, bucket.index))
        return fut

    def reduce_groups(self, groups: Sequence[Sequence[Grad]]) -> List[Future]:
        futures: List[Future] = []
        callbacks = []
        for grads in groups:
            bucket = self.pool.obtain()  # leak: late binding, every callback recycles the last bucket
            bucket.load(grads)
            futures.append(self.comm.all_reduce(bucket))
            callbacks.append(lambda _f: self.pool.recycle(bucket))
        for fut, cb in zip(futures, callbacks):
            fut.add_done_callback(cb)
        return futures

    def reduce_groups_bound(self, groups: Sequence[Sequence[Grad]]) -> List[Future]:
        futures: List[Future] = []
        for grads in groups:
            bucket = self.pool.obtain()  # clean: near miss, bound as the default argument of its own callback
            bucket.load(grads)
            fut = self.comm.all_reduce(bucket)
            fut.add_done_callback(lambda _f, b=bucket: self.pool.recycle(b))
            futures.append(fut)
        return futures

    def reduce_or_accumulate(self, grads: Sequence[Grad], carry: Grad) -> Optional[Future]:
        bucket = self.pool.obtain()  # leak: accumulation steps return without recycling
        bucket.load(grads)
        if not self.require_sync:
            carry.extend(bucket.flat)
            return None
        fut = self.comm.all_reduce(bucket)
        fut.add_done_callback(partial(self._finish, bucket, grads))
        return fut

    def enqueue(self, grads: Sequence[Grad]) -> None:
        bucket = self.pool.obtain()  # clean: queued with its future, drain() recycles it
        bucket.load(grads)
        self._inflight.append((self.comm.all_reduce(bucket), bucket, grads))

    def drain(self) -> int:
        n = 0
        while self._inflight:
            fut, bucket, grads = self._inflight.popleft()
            try:
                fut.result()
            except Exception:
                self.failures += 1
            else:
                bucket.unload(grads, 1.0 / self.comm.world_size)
                n += 1
            self.pool.recycle(bucket)
        return n

    def first_grad(self, group: int, grads: Sequence[Grad]) -> None:
        bucket = self._by_group.get(group)
        if bucket is None:
            bucket = self.pool.obtain()  # clean: near miss, only for a group without one, finalize() recycles
            self._by_group[group] = bucket
        bucket.load(grads)

    def finalize(self) -> None:
        for group in sorted(self._by_group):
            self.pool.recycle(self._by_group[group])
        self._by_group.clear()


class RebuildableBuckets:
    """Buckets assigned in the order of gradient arrival after the first step."""

    def __init__(self, pool: BucketPool) -> None:
        self.pool = pool
        self.assigned: Dict[str, Bucket] = {}

    def assign(self, name: str) -> Bucket:
        if name not in self.assigned:
            self.assigned[name] = self.pool.obtain()  # leak: rebuild() filters the table and drops those left out
        return self.assigned[name]

    def rebuild(self, order: Sequence[str]) -> None:
        self.assigned = {n: self.assigned[n] for n in order if n in self.assigned}

    def close(self) -> None:
        for bucket in self.assigned.values():
            self.pool.recycle(bucket)
        self.assigned = {}


class FlatParam:
    """A parameter view that lives in a bucket as long as the module does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.flat: Optional[List[float]] = None


def flatten_into(pool: BucketPool, param: FlatParam, grads: Sequence[Grad]) -> None:
    bucket = pool.obtain()  # clean: near miss, the finalizer of the parameter recycles it
    bucket.load(grads)
    param.flat = bucket.flat
    weakref.finalize(param, pool.recycle, bucket)


def grad_norm(pool: BucketPool, grads: Sequence[Grad]) -> float:
    bucket = pool.obtain()  # leak: no gradients returns before the recycle
    bucket.load(grads)
    if not bucket.flat:
        return 0.0
    total = sum(x * x for x in bucket.flat) ** 0.5
    pool.recycle(bucket)
    return total


def main() -> Any:
    pool, comm = BucketPool(8, 64), Communicator()
    red = BucketReducer(pool, comm)
    g = [[1.0, 2.0], [3.0]]
    for fn in (red.reduce_async, red.reduce_averaged, red.reduce_bound):
        fn(g).result()
    for f in red.reduce_groups_bound([g, g]):
        f.result()
    red.enqueue(g)
    red.first_grad(0, g)
    red.finalize()
    p = FlatParam("w")
    flatten_into(pool, p, g)
    del p
    out = red.drain(), grad_norm(pool, g), red.reduce_or_accumulate(g, [])
    comm.close()
    return out, pool.idle


if __name__ == "__main__":
    print(main())
