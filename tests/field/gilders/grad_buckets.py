"""Gradient bucketing and overlapped all-reduce for data parallel training."""
from __future__ import annotations

import logging
from typing import Callable, Dict, Iterator, List, Optional, Tuple

logger = logging.getLogger("grad_buckets")


class CommError(RuntimeError):
    pass


class Region:
    __slots__ = ("offset", "data")

    def __init__(self, offset: int, numel: int):
        self.offset = offset
        self.data = [0.0] * numel


class BucketArena:
    """Fixed set of equally sized communication regions."""

    def __init__(self, bucket_numel: int, capacity: int):
        self.bucket_numel = bucket_numel
        self._free: List[Region] = [Region(i * bucket_numel, bucket_numel) for i in range(capacity)]

    def __len__(self) -> int:
        return len(self._free)

    def alloc(self) -> Optional[Region]:
        return self._free.pop() if self._free else None

    def free(self, region: Region) -> None:
        self._free.append(region)

    def alloc_zeroed(self) -> Optional[Region]:
        region = self.alloc()  # clean: near miss, None or handed to the caller
        if region is not None:
            region.data[:] = [0.0] * self.bucket_numel
        return region


class Work:
    """Handle of one asynchronous collective."""

    def __init__(self, region: Region, world: int):
        self.region = region
        self.world = world
        self._callbacks: List[Callable[[Region], None]] = []
        self._done = False

    def then(self, fn: Callable[[Region], None]) -> None:
        self._callbacks.append(fn)

    def wait(self) -> None:
        if self._done:
            return
        self.region.data[:] = [v / self.world for v in self.region.data]
        self._done = True
        for fn in self._callbacks:
            fn(self.region)


class ProcessGroup:
    def __init__(self, world: int = 2):
        self.world = world
        self.aborted = False

    def all_reduce(self, region: Region) -> Work:
        if self.aborted:
            raise CommError("process group aborted")
        return Work(region, self.world)


class Bucket:
    def __init__(self, index: int, params: List[Tuple[str, int]]):
        self.index = index
        self.params = params
        self.pending = {name for name, _ in params}
        self.region: Optional[Region] = None
        self.sparse = False

    def slot(self, name: str) -> Tuple[int, int]:
        start = 0
        for n, size in self.params:
            if n == name:
                return start, size
            start += size
        raise KeyError(name)


class Reducer:
    def __init__(self, arena: BucketArena, group: ProcessGroup, buckets: List[Bucket],
                 gradient_as_view: bool = False):
        self.arena = arena
        self.group = group
        self.buckets = buckets
        self.gradient_as_view = gradient_as_view
        self._works: List[Tuple[Bucket, Work]] = []
        self.grads: Dict[str, List[float]] = {}
        self._views: Dict[int, Region] = {}

    # -- autograd hook ---------------------------------------------------
    def mark_ready(self, bucket: Bucket, name: str, grad: List[float]) -> None:
        if bucket.region is None:
            bucket.region = self.arena.alloc_zeroed()  # clean: near miss, taken once per bucket and given back in finalize
            if bucket.region is None:
                raise MemoryError("bucket arena exhausted")
        start, size = bucket.slot(name)
        bucket.region.data[start:start + size] = grad
        bucket.pending.discard(name)
        if not bucket.pending:
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        work = self.group.all_reduce(bucket.region)
        self._works.append((bucket, work))

    def finalize(self) -> None:
        for bucket, work in self._works:
            work.wait()
            self._scatter(bucket, work.region)
            self.arena.free(work.region)
            bucket.region = None
            bucket.pending = {n for n, _ in bucket.params}
        self._works.clear()

    def _scatter(self, bucket: Bucket, region: Region) -> None:
        for name, _ in bucket.params:
            start, size = bucket.slot(name)
            self.grads[name] = region.data[start:start + size]

    # -- one-shot reductions ----------------------------------------------
    def reduce_now(self, values: List[float]) -> Optional[List[float]]:
        region = self.arena.alloc()  # leak: lost when the CommError is caught
        if region is None:
            return None
        region.data[: len(values)] = values
        try:
            self.group.all_reduce(region).wait()
        except CommError as exc:
            logger.warning("reduction skipped: %s", exc)
            return None
        out = region.data[: len(values)]
        self.arena.free(region)
        return out

    def reduce_with_retry(self, values: List[float], attempts: int = 3) -> List[float]:
        last: Optional[Exception] = None
        for attempt in range(attempts):
            region = self.arena.alloc_zeroed()  # leak: each failed attempt drops its region
            if region is None:
                raise MemoryError("bucket arena exhausted")
            region.data[: len(values)] = values
            try:
                self.group.all_reduce(region).wait()
                result = region.data[: len(values)]
                self.arena.free(region)
                return result
            except CommError as exc:
                last = exc
                logger.info("attempt %d failed", attempt)
        raise CommError("gave up") from last

    def reduce_persistent(self, values: List[float], attempts: int = 3) -> Optional[List[float]]:
        region = self.arena.alloc_zeroed()  # clean: near miss, one region for all attempts, given back after the loop
        if region is None:
            return None
        result = None
        for _ in range(attempts):
            try:
                region.data[: len(values)] = values
                self.group.all_reduce(region).wait()
            except CommError:
                continue
            result = region.data[: len(values)]
            break
        self.arena.free(region)
        return result

    # -- callbacks -------------------------------------------------------
    def reduce_async(self, values: List[float], on_done: Callable[[List[float]], None]) -> Optional[Work]:
        region = self.arena.alloc_zeroed()  # clean: near miss, the work's callback frees it
        if region is None:
            return None
        n = len(values)
        region.data[:n] = values
        work = self.group.all_reduce(region)

        def finish(done: Region) -> None:
            on_done(done.data[:n])
            self.arena.free(done)

        work.then(finish)
        return work

    def reduce_logged(self, values: List[float]) -> Optional[Work]:
        region = self.arena.alloc_zeroed()  # leak: the callback reads the region but nobody frees it
        if region is None:
            return None
        region.data[: len(values)] = values
        work = self.group.all_reduce(region)
        work.then(lambda done: logger.info("mean %.4f", sum(done.data) / len(done.data)))
        return work

    # -- views -----------------------------------------------------------
    def publish_view(self, bucket: Bucket) -> List[float]:
        region = self.arena.alloc()  # leak: kept in the view table only when gradients are views, otherwise copied and dropped
        if region is None:
            raise MemoryError("bucket arena exhausted")
        if self.gradient_as_view:
            self._views[bucket.index] = region
            return region.data
        return list(region.data)

    def rebuild_view(self, bucket: Bucket) -> None:
        old = self._views.pop(bucket.index, None)
        fresh = self.arena.alloc_zeroed()  # clean: moved into the view table, release_views gives it back
        if fresh is None:
            if old is not None:
                self._views[bucket.index] = old
            return
        if old is not None:
            fresh.data[:] = old.data
            self.arena.free(old)
        self._views[bucket.index] = fresh

    def release_views(self) -> None:
        for region in self._views.values():
            self.arena.free(region)
        self._views.clear()

    # -- iteration --------------------------------------------------------
    def iter_reduced(self, chunks: List[List[float]]) -> Iterator[List[float]]:
        for chunk in chunks:
            region = self.arena.alloc_zeroed()  # leak: a consumer that breaks at the yield never reaches the free
            if region is None:
                return
            region.data[: len(chunk)] = chunk
            self.group.all_reduce(region).wait()
            yield region.data[: len(chunk)]
            self.arena.free(region)

    def first_nonzero(self, chunks: List[List[float]]) -> Optional[List[float]]:
        for reduced in self.iter_reduced(chunks):
            if any(reduced):
                return list(reduced)
        return None


if __name__ == "__main__":
    arena = BucketArena(8, 8)
    bs = [Bucket(0, [("w", 4), ("b", 2)]), Bucket(1, [("v", 3)])]
    red = Reducer(arena, ProcessGroup(), bs)
    for _ in range(2):
        red.mark_ready(bs[0], "w", [1.0] * 4)
        red.mark_ready(bs[1], "v", [3.0] * 3)
        red.mark_ready(bs[0], "b", [2.0] * 2)
        red.finalize()
    print(red.grads, len(arena))
    red.reduce_async([1.0, 2.0], print).wait()
    print(red.reduce_now([4.0]), red.reduce_persistent([4.0]), red.reduce_with_retry([1.0]), len(arena))
    print(red.first_nonzero([[0.0], [2.0]]), len(arena))
