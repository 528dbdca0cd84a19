"""Captured-graph runner: leases of static input buffers per batch size, capture scopes."""
from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Type

import numpy as np

logger = logging.getLogger(__name__)


class CaptureError(RuntimeError):
    pass


class Lease:
    def __init__(self, arena: "GraphArena", bucket: int, storage: np.ndarray) -> None:
        self.arena = arena
        self.bucket = bucket
        self.storage = storage
        self.open = True

    def end(self) -> None:
        if self.open:
            self.open = False
            self.arena._return(self)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.end()


class GraphArena:
    """lease(n) -> Lease of the smallest bucket that holds n; None when all of that bucket are out."""

    def __init__(self, buckets: Sequence[int], copies: int, width: int) -> None:
        self.buckets = sorted(buckets)
        self._stock: Dict[int, List[np.ndarray]] = {
            b: [np.zeros((b, width), dtype=np.float32) for _ in range(copies)] for b in self.buckets
        }
        self._lock = threading.Lock()

    def bucket_for(self, n: int) -> int:
        return self.buckets[bisect_left(self.buckets, n)]

    def lease(self, n: int) -> Optional[Lease]:
        b = self.bucket_for(n)
        with self._lock:
            if not self._stock[b]:
                return None
            return Lease(self, b, self._stock[b].pop())

    def _return(self, lease: Lease) -> None:
        with self._lock:
            self._stock[lease.bucket].append(lease.storage)

    def idle(self) -> int:
        with self._lock:
            return sum(map(len, self._stock.values()))


@dataclass
class Graph:
    bucket: int
    fn: Callable[[np.ndarray], np.ndarray]
    inputs: Lease


class CaptureScope:
    """Holds the input lease during capture; keep() moves it into the graph."""

    def __init__(self, arena: GraphArena, n: int, strict: bool = False) -> None:
        self.arena = arena
        self.n = n
        self.strict = strict
        self.inputs: Optional[Lease] = None

    def __enter__(self) -> "CaptureScope":
        self.inputs = self.arena.lease(self.n)  # leak: __exit__ returns early for a CaptureError that is not strict
        return self

    def keep(self) -> Lease:
        lease, self.inputs = self.inputs, None
        return lease

    def __exit__(self, et: Optional[Type[BaseException]], ev: Optional[BaseException], tb: Any) -> bool:
        if et is not None and issubclass(et, CaptureError) and not self.strict:
            logger.warning("capture of %d failed: %s", self.n, ev)
            return True
        if self.inputs is not None:
            self.inputs.end()
            self.inputs = None
        return False


class ReplayScope:
    def __init__(self, arena: GraphArena, n: int) -> None:
        self.arena = arena
        self.n = n

    def __enter__(self) -> Optional[Lease]:
        self._lease = self.arena.lease(self.n)  # clean: near miss, the early return of __exit__ is the way without a lease
        return self._lease

    def __exit__(self, et: Any, ev: Any, tb: Any) -> bool:
        if self._lease is None:
            return False
        self._lease.end()
        return et is not None and issubclass(et, CaptureError)


class GraphRunner:
    def __init__(self, arena: GraphArena, fn: Callable[[np.ndarray], np.ndarray]) -> None:
        self.arena = arena
        self.fn = fn
        self.graphs: Dict[int, Graph] = {}
        self.eager = 0

    def capture(self, n: int) -> bool:
        bucket = self.arena.bucket_for(n)
        if bucket in self.graphs:
            return True
        lease = self.arena.lease(n)  # clean: near miss, ended on a failed warm-up, else owned by the graph
        if lease is None:
            return False
        try:
            self.fn(lease.storage)
        except CaptureError:
            lease.end()
            return False
        self.graphs[bucket] = Graph(bucket, self.fn, lease)
        return True

    def recapture(self, n: int) -> bool:
        """After a weight update: capture again over the same bucket."""
        bucket = self.arena.bucket_for(n)
        lease = self.arena.lease(n)  # leak: a failing warm-up is survived without ending the lease
        if lease is None:
            return False
        try:
            self.fn(lease.storage)
        except CaptureError as exc:
            logger.error("recapture of %d: %s", bucket, exc)
            return False
        old = self.graphs.pop(bucket, None)
        if old is not None:
            old.inputs.end()
        self.graphs[bucket] = Graph(bucket, self.fn, lease)
        return True

    def run(self, x: np.ndarray) -> np.ndarray:
        g = self.graphs.get(self.arena.bucket_for(len(x)))
        if g is None:
            return self.run_eager(x)
        g.inputs.storage[: len(x)] = x
        return g.fn(g.inputs.storage)[: len(x)].copy()

    def run_eager(self, x: np.ndarray) -> np.ndarray:
        lease = self.arena.lease(len(x))  # clean: near miss, `with` on the not-None branch
        if lease is None:
            return self.fn(x)
        with lease:
            lease.storage[: len(x)] = x
            self.eager += 1
            return self.fn(lease.storage)[: len(x)].copy()

    def run_padded(self, x: np.ndarray, pad: float) -> np.ndarray:
        lease = self.arena.lease(len(x))  # leak: the exact fit returns without end
        if lease is None:
            return self.fn(x)
        lease.storage[: len(x)] = x
        if len(x) == lease.bucket:
            return self.fn(lease.storage).copy()
        lease.storage[len(x) :] = pad
        y = self.fn(lease.storage)[: len(x)].copy()
        lease.end()
        return y

    def run_microbatches(self, xs: List[np.ndarray]) -> List[np.ndarray]:
        out: List[np.ndarray] = []
        lease: Optional[Lease] = None
        for x in xs:
            if lease is not None and len(x) > lease.bucket:
                lease.end()
                lease = None
            if lease is None:
                lease = self.arena.lease(len(x))  # clean: near miss, reused across turns, ended before replacement and at the end
            target = x if lease is None else lease.storage
            target[: len(x)] = x
            out.append(self.fn(target)[: len(x)].copy())
        if lease is not None:
            lease.end()
        return out

    def run_ragged(self, xs: List[np.ndarray]) -> List[np.ndarray]:
        out: List[np.ndarray] = []
        lease: Optional[Lease] = None
        for x in xs:
            if lease is None or len(x) > lease.bucket:
                lease = self.arena.lease(len(x))  # leak: growing to a larger bucket rebinds the smaller lease
            target = x if lease is None else lease.storage
            target[: len(x)] = x
            out.append(self.fn(target)[: len(x)].copy())
        if lease is not None:
            lease.end()
        return out

    def pair(self, q: np.ndarray, kv: np.ndarray) -> Optional[np.ndarray]:
        lq = self.arena.lease(len(q))  # clean: near miss, ended on the way where the second is missing
        lkv = self.arena.lease(len(kv)) if lq is not None else None  # clean: ended with the first
        if lq is None or lkv is None:
            if lq is not None:
                lq.end()
            return None
        lq.storage[: len(q)] = q
        lkv.storage[: len(kv)] = kv
        y = self.fn(lq.storage)[: len(q)] + float(self.fn(lkv.storage).sum())
        lkv.end()
        lq.end()
        return y

    def close(self) -> None:
        while self.graphs:
            _, g = self.graphs.popitem()
            g.inputs.end()


def capture_all(runner: GraphRunner) -> List[int]:
    done: List[int] = []
    for b in runner.arena.buckets:
        with CaptureScope(runner.arena, b, strict=True) as scope:  # clean: near miss, a strict scope never takes the early return, keep() moves the lease into the graph
            if scope.inputs is None or b in runner.graphs:
                continue
            runner.fn(scope.inputs.storage)
            runner.graphs[b] = Graph(b, runner.fn, scope.keep())
            done.append(b)
    return done


def replay(runner: GraphRunner, n: int) -> bool:
    with ReplayScope(runner.arena, n) as lease:  # clean: with over a sound context manager
        if lease is None:
            return False
        runner.fn(lease.storage)
    return True
