"""Gradient bucketing with asynchronous reduction.

Buckets are checked out of a manager, filled by the autograd hooks, reduced, and checked in again.
Each reduction in flight owns a work handle that has to be retired, or the communicator's table fills up.
"""
from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import Callable, Deque, Dict, List, Optional, Sequence, Tuple

logger = logging.getLogger("train.buckets")


class Bucket:
    __slots__ = ("data", "fill", "ident")

    def __init__(self, ident: int, size: int):
        self.ident = ident
        self.data = [0.0] * size
        self.fill = 0

    @property
    def room(self) -> int:
        return len(self.data) - self.fill

    def put(self, grad: Sequence[float]) -> None:
        self.data[self.fill:self.fill + len(grad)] = grad
        self.fill += len(grad)


class BucketManager:
    def __init__(self, size: int, count: int):
        self._idle: List[Bucket] = [Bucket(i, size) for i in range(count)]
        self._out: Dict[int, Bucket] = {}

    def checkout(self) -> Optional[Bucket]:
        if not self._idle:
            return None
        b = self._idle.pop()
        b.fill = 0
        self._out[b.ident] = b
        return b

    def checkin(self, b: Bucket) -> None:
        del self._out[b.ident]
        self._idle.append(b)

    @property
    def outstanding(self) -> int:
        return len(self._out)


class Communicator:
    MAX_INFLIGHT = 64

    def __init__(self, world: int):
        self.world = world
        self._ids = itertools.count()
        self._table: Dict[int, Bucket] = {}
        self._hooks: Dict[int, List[Callable[[], None]]] = {}

    def issue(self, b: Bucket) -> int:
        h = next(self._ids)
        self._table[h] = b
        return h

    def retire(self, h: int) -> None:
        self._table.pop(h)
        for fn in self._hooks.pop(h, ()):
            fn()

    def on_retire(self, h: int, fn: Callable[[], None]) -> None:
        self._hooks.setdefault(h, []).append(fn)


class Reducer:
    """Fills buckets in order of the backward pass and reduces each as soon as it is full."""

    def __init__(self, mgr: BucketManager, comm: Communicator):
        self.mgr = mgr
        self.comm = comm
        self._current: Optional[Bucket] = None
        self._pending: Deque[Tuple[int, Bucket]] = deque()

    def add(self, grad: Sequence[float]) -> bool:
        if self._current is not None and self._current.room < len(grad):
            self.flush()
        if self._current is None:
            self._current = self.mgr.checkout()  # clean: near miss, flush moves it to the pending queue before the next one
            if self._current is None:
                return False
        self._current.put(grad)
        return True

    def flush(self) -> None:
        if self._current is None:
            return
        h = self.comm.issue(self._current)  # clean: queued with its bucket, finish retires it
        self._pending.append((h, self._current))
        self._current = None

    def finish(self) -> List[float]:
        self.flush()
        out: List[float] = []
        while self._pending:
            h, b = self._pending.popleft()
            self.comm.retire(h)
            out.extend(v / self.comm.world for v in b.data[:b.fill])
            self.mgr.checkin(b)
        return out


class SparseReducer:
    """Reduces embedding gradients; rows that nobody touched are not sent."""

    def __init__(self, mgr: BucketManager, comm: Communicator):
        self.mgr = mgr
        self.comm = comm
        self._inflight: Dict[str, Tuple[int, Bucket]] = {}

    def submit(self, name: str, rows: Dict[int, float]) -> bool:
        if name in self._inflight:
            return False
        b = self.mgr.checkout()  # leak: drain passes over buckets whose fill is zero and then clears the table
        if b is None:
            return False
        for v in rows.values():
            b.put([v])
        self._inflight[name] = (self.comm.issue(b), b)  # clean: drain retires every handle
        return True

    def drain(self) -> Dict[str, List[float]]:
        result: Dict[str, List[float]] = {}
        for name, (h, b) in self._inflight.items():
            self.comm.retire(h)
            if not b.fill:
                continue
            result[name] = b.data[:b.fill]
            self.mgr.checkin(b)
        self._inflight.clear()
        return result


class AccumulationWindow:
    """Several micro-batches add into one bucket before the reduction; without accumulation it is a no-op."""

    def __init__(self, mgr: BucketManager, accumulate: bool):
        self.mgr = mgr
        self.accumulate = accumulate
        self._acc: Optional[Bucket] = None

    def open(self) -> None:
        if self.accumulate and self._acc is None:
            self._acc = self.mgr.checkout()  # clean: near miss, close tests the same attribute, which is never changed

    def add(self, grad: Sequence[float]) -> bool:
        if self._acc is None or self._acc.room < len(grad):
            return False
        self._acc.put(grad)
        return True

    def close(self) -> None:
        if self.accumulate and self._acc is not None:
            self.mgr.checkin(self._acc)
            self._acc = None


class OverflowProbe:
    """Keeps a copy of the first gradients of a step for the loss scaler."""

    def __init__(self, mgr: BucketManager):
        self.mgr = mgr
        self.enabled = True
        self._probe: Optional[Bucket] = None

    def begin(self) -> None:
        if self.enabled:
            self._probe = self.mgr.checkout()  # leak: observe may switch the probe off, and end then does nothing

    def observe(self, grad: Sequence[float]) -> None:
        if self._probe is not None and self._probe.room >= len(grad):
            self._probe.put(grad)
        if not any(grad):
            self.enabled = False

    def end(self) -> None:
        if self.enabled and self._probe is not None:
            self.mgr.checkin(self._probe)
            self._probe = None


def reduce_now(mgr: BucketManager, comm: Communicator, grad: Sequence[float],
               bucket: Optional[Bucket] = None) -> List[float]:
    own = bucket is None
    if own:
        bucket = mgr.checkout()  # clean: near miss, given back under the same flag
    if bucket is None:
        return list(grad)
    bucket.put(grad)
    h = comm.issue(bucket)  # clean: retired two lines on
    out = [v / comm.world for v in bucket.data[:bucket.fill]]
    comm.retire(h)
    if own:
        mgr.checkin(bucket)
    return out


def reduce_later(mgr: BucketManager, comm: Communicator, grad: Sequence[float],
                 keep: Optional[Bucket] = None, tail: bool = False) -> Optional[int]:
    own = keep is None
    b = mgr.checkout() if own else keep  # leak: an own bucket of a tail reduction gets no callback
    if b is None:
        return None
    b.put(grad)
    h = comm.issue(b)  # clean: returned to the caller
    if own and not tail:
        comm.on_retire(h, lambda: mgr.checkin(b))
    return h


def checkout_fitting(mgr: BucketManager, numel: int, attempts: int = 4) -> Optional[Bucket]:
    """Buckets can differ in size after a rebuild; look for one that is large enough."""
    for _ in range(attempts):
        b = mgr.checkout()  # leak: a bucket that is too small is rebound by the next attempt
        if b is None:
            return None
        if b.room >= numel:
            return b
        logger.debug("bucket %d holds only %d", b.ident, b.room)
    return None


def checkout_largest(mgr: BucketManager, attempts: int = 4) -> Optional[Bucket]:
    best: Optional[Bucket] = None
    for _ in range(attempts):
        b = mgr.checkout()  # clean: near miss, the lesser of the two is checked in each time round
        if b is None:
            break
        if best is None:
            best = b
        elif b.room > best.room:
            mgr.checkin(best)
            best = b
        else:
            mgr.checkin(b)
    return best
