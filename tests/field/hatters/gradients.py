"""Gradient buckets, scratch space and collectives of the data-parallel trainer."""
from __future__ import annotations

import itertools
import threading
from array import array
from contextlib import contextmanager
from dataclasses import dataclass


class BucketError(RuntimeError):
    pass


class Bucket:
    def __init__(self, shelf, dtype, capacity):
        self._shelf = shelf
        self.dtype = dtype
        self.data = array("d", bytes(8 * capacity))
        self.fill = 0
        self.open = False

    def add(self, grad):
        self.data[self.fill : self.fill + len(grad)] = array("d", grad)
        self.fill += len(grad)

    def flush(self, reduce):
        out = reduce(self.data[: self.fill])
        self._shelf._shelve(self)
        return out

    def discard(self):
        self._shelf._shelve(self)


class BucketShelf:
    def __init__(self, capacity=1024):
        self._capacity = capacity
        self._ready = {}
        self.n_open = 0

    def open_bucket(self, dtype):
        spare = self._ready.setdefault(dtype, [])
        b = spare.pop() if spare else Bucket(self, dtype, self._capacity)
        b.open = True
        self.n_open += 1
        return b

    def _shelve(self, bucket):
        if not bucket.open:
            raise BucketError("bucket is not open")
        bucket.open = False
        bucket.fill = 0
        self.n_open -= 1
        self._ready[bucket.dtype].append(bucket)


def reduce_params(shelf, params, reduce):
    bucket = shelf.open_bucket("f4")  # clean: discarded when empty, flushed else
    for p in params:
        if p.grad is not None:
            bucket.add(p.grad)
    if bucket.fill == 0:
        bucket.discard()
        return None
    return bucket.flush(reduce)


def reduce_by_dtype(shelf, params, reduce):
    buckets = {}
    for p in params:
        b = buckets.get(p.dtype)
        if b is None:
            b = buckets[p.dtype] = shelf.open_bucket(p.dtype)  # leak: buckets without fill are dropped at the end
        if p.grad is not None:
            b.add(p.grad)
    return {d: b.flush(reduce) for d, b in buckets.items() if b.fill}


def reduce_overflowing(shelf, grads, reduce, capacity=1024):
    bucket = shelf.open_bucket("f4")  # clean: flushed before it is rebound, the last after the loop
    for g in grads:
        if bucket.fill + len(g) > capacity:
            bucket.flush(reduce)
            bucket = shelf.open_bucket("f4")  # clean: near miss, flushed by the next turn or after the loop
        bucket.add(g)
    bucket.flush(reduce)


class ScratchSpace:
    """Thread-local stacks of scratch arrays."""

    def __init__(self):
        self._tls = threading.local()
        self.outstanding = 0

    def grab(self, n):
        stack = self._tls.__dict__.setdefault("stack", [])
        self.outstanding += 1
        for i, arr in enumerate(stack):
            if len(arr) >= n:
                return stack.pop(i)
        return array("d", bytes(8 * n))

    def ungrab(self, arr):
        self.outstanding -= 1
        self._tls.__dict__.setdefault("stack", []).append(arr)

    @contextmanager
    def borrowed(self, n):
        arr = self.grab(n)
        try:
            yield arr
        finally:
            self.ungrab(arr)


def clip_norm(space, grads, limit):
    tmp = space.grab(len(grads))  # leak: a norm under the limit returns early
    for i, g in enumerate(grads):
        tmp[i] = g * g
    norm = sum(tmp[: len(grads)]) ** 0.5
    if norm <= limit:
        return grads
    scaled = [g * limit / norm for g in grads]
    space.ungrab(tmp)
    return scaled


def dot(space, xs, ys):
    with space.borrowed(len(xs)) as tmp:  # clean: with gives it back on the early return too
        if len(xs) != len(ys):
            return None
        for i, (x, y) in enumerate(zip(xs, ys)):
            tmp[i] = x * y
        return sum(tmp[: len(xs)])


def centered(space, xs):
    tmp = space.grab(len(xs))  # leak: rebound to the second array, only that one is given back
    mean = sum(xs) / len(xs)
    for i, x in enumerate(xs):
        tmp[i] = x - mean
    var = sum(tmp[: len(xs)])
    tmp = space.grab(1)  # clean: given back at the end
    tmp[0] = var
    out = tmp[0]
    space.ungrab(tmp)
    return out


class CollectiveTable:
    """Handles of running collectives: ints with a tag in the upper bits."""

    _TAG = 0xC0 << 24

    def __init__(self, backend):
        self._backend = backend
        self._works = {}
        self._seq = itertools.count()

    def launch(self, op, tensor):
        h = self._TAG | next(self._seq) & 0xFFFFFF
        self._works[h] = self._backend(op, tensor)
        return h

    def join(self, h):
        work = self._works.pop(h)
        return work.result()

    def abort(self, h):
        self._works.pop(h).cancel()

    def poll(self, h):
        return self._works[h].done()


def overlap(table, chunks, compute):
    prev = None
    for chunk in chunks:
        h = table.launch("all_reduce", chunk)  # clean: near miss, joined one turn later or after the loop
        if prev is not None:
            table.join(prev)
        compute(chunk)
        prev = h
    if prev is not None:
        table.join(prev)


def barrier(table, token, fast):
    h = table.launch("barrier", token)  # leak: the fast way reads poll and goes without join or abort
    if fast:
        return table.poll(h)
    table.join(h)
    return True


def gather_or_abort(table, tensor, deadline):
    h = table.launch("all_gather", tensor)  # clean: joined or aborted
    while not table.poll(h):
        if deadline.passed():
            table.abort(h)
            return None
    return table.join(h)


class ReduceLanes:
    """A bounded number of lanes behind a semaphore."""

    def __init__(self, n):
        self._sem = threading.BoundedSemaphore(n)
        self._n = n
        self.used = 0

    def enter_lane(self, block=True, timeout=None):
        ok = self._sem.acquire(block, timeout)
        if ok:
            self.used += 1
        return ok

    def exit_lane(self):
        self.used -= 1
        self._sem.release()


def reduce_in_lane(lanes, comm, bucket):
    if not lanes.enter_lane(timeout=1.0):  # leak: an empty bucket returns from inside the lane
        raise TimeoutError("no lane")
    if not bucket:
        return bucket
    out = comm.all_reduce(bucket)
    lanes.exit_lane()
    return out


def try_reduce(lanes, comm, bucket):
    if lanes.enter_lane(block=False):  # clean: exit in finally
        try:
            return comm.all_reduce(bucket)
        finally:
            lanes.exit_lane()
    return None


def reduce_with_retry(lanes, comm, bucket):
    for _ in range(3):
        lanes.enter_lane()  # leak: a caught BucketError retries and enters a second lane
        try:
            out = comm.all_reduce(bucket)
        except BucketError:
            continue
        lanes.exit_lane()
        return out
    return None


@dataclass
class Master:
    name: str
    value: object
    users: int = 0


class MasterWeights:
    """Full-precision copies that live while somebody uses them."""

    def __init__(self, load):
        self._load = load
        self._live = {}

    def materialize(self, name):
        m = self._live.get(name)
        if m is None:
            m = self._live[name] = Master(name, self._load(name))
        m.users += 1
        return m

    def dematerialize(self, master):
        master.users -= 1
        if master.users == 0:
            del self._live[master.name]


def apply_update(weights, updates):
    for name, delta in updates.items():
        m = weights.materialize(name)  # clean: dematerialized on both ways
        if m.value is None:
            weights.dematerialize(m)
            continue
        m.value = [v + d for v, d in zip(m.value, delta)]
        weights.dematerialize(m)


def compare_masters(weights, names, ref):
    worst = None
    for name in names:
        m = weights.materialize(name)  # leak: each better candidate overwrites worst, only the last worst is dematerialized
        err = abs(m.value - ref[name])
        if worst is None or err > worst[0]:
            worst = (err, m)
        else:
            weights.dematerialize(m)
    if worst is None:
        return None
    weights.dematerialize(worst[1])
    return worst[1].name


class LossMeter:
    def __init__(self):
        self.total = 0.0
        self.count = 0
        self.windows = []

    def open_window(self):
        self.windows.append((self.total, self.count))
        return len(self.windows) - 1

    def acquire(self, value):
        self.total += value
        self.count += 1

    def mean_since(self, window):
        t, c = self.windows[window]
        return (self.total - t) / max(1, self.count - c)


def epoch_loss(meter, batches):
    window = meter.open_window()  # clean: a mark in a statistic
    for b in batches:
        if b is None:
            continue
        meter.acquire(b)  # clean: counts a number, nothing is taken
    return meter.mean_since(window)
