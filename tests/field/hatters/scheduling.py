"""Quotas, gangs, epochs, thread numbers and timers of the scheduler."""
from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from contextlib import contextmanager


class Refused(Exception):
    pass


class QuotaTree:
    """Counts of running jobs along a path of groups."""

    def __init__(self, limits):
        self._limits = limits
        self._running = {}

    @staticmethod
    def _prefixes(path):
        parts = path.split("/")
        return ["/".join(parts[: i + 1]) for i in range(len(parts))]

    def check_in(self, path):
        nodes = self._prefixes(path)
        for node in nodes:
            if self._running.get(node, 0) >= self._limits.get(node, 1 << 30):
                raise Refused(node)
        for node in nodes:
            self._running[node] = self._running.get(node, 0) + 1

    def check_out(self, path):
        for node in self._prefixes(path):
            self._running[node] -= 1


def start_job(tree, launcher, job):
    try:
        tree.check_in(job.group)  # leak: a launcher that answers None leaves the group counted
    except Refused:
        return None
    proc = launcher.spawn(job)
    if proc is None:
        return None
    proc.on_exit(lambda: tree.check_out(job.group))
    return proc


def run_inline(tree, job):
    tree.check_in(job.group)  # clean: near miss, the path is kept before the job moves to another group
    group = job.group
    job.run()
    tree.check_out(group)
    return job.group


class GangDesk:
    """Two-phase: hold some workers, then confirm or cancel the hold; a confirmed gang is dissolved."""

    def __init__(self, workers):
        self._free = deque(workers)
        self._holds = {}
        self._gangs = {}
        self._serial = itertools.count(1)

    def hold_workers(self, n):
        if n > len(self._free):
            return 0
        hold = next(self._serial)
        self._holds[hold] = [self._free.popleft() for _ in range(n)]
        return hold

    def cancel(self, hold):
        self._free.extend(self._holds.pop(hold))

    def confirm(self, hold):
        self._gangs[hold] = self._holds.pop(hold)
        return self._gangs[hold]

    def dissolve(self, hold):
        self._free.extend(self._gangs.pop(hold))


def plan_two(desk, n_train, n_eval):
    train = desk.hold_workers(n_train)  # leak: without workers for evaluation it returns with the hold pending
    if not train:
        return None
    evals = desk.hold_workers(n_eval)  # clean: returned with the other to the caller
    if not evals:
        return None
    return train, evals


def run_gang(desk, n, fn):
    hold = desk.hold_workers(n)  # clean: cancelled, or confirmed and dissolved
    if not hold:
        return None
    if not fn.ready():
        desk.cancel(hold)
        return None
    workers = desk.confirm(hold)  # clean: dissolved in finally
    try:
        return fn(workers)
    finally:
        desk.dissolve(hold)


def largest_gang(desk, sizes, fits):
    best = 0
    for n in sorted(sizes):
        hold = desk.hold_workers(n)  # leak: a larger hold that fits overwrites best, which is not cancelled
        if not hold:
            break
        if fits(n):
            best = hold
        else:
            desk.cancel(hold)
    return best


class EpochGate:
    """Readers pin the epoch; garbage of older epochs is freed when nobody pins them."""

    def __init__(self):
        self._epoch = 0
        self._pins = {}
        self._garbage = []

    def enter(self):
        e = self._epoch
        self._pins[e] = self._pins.get(e, 0) + 1
        return e

    def exit(self, e):
        self._pins[e] -= 1
        if not self._pins[e]:
            del self._pins[e]
            self._sweep()

    def defer_free(self, fn):
        self._garbage.append((self._epoch, fn))
        self._epoch += 1
        self._sweep()

    def _sweep(self):
        oldest = min(self._pins, default=self._epoch)
        keep = []
        for e, fn in self._garbage:
            if e < oldest:
                fn()
            else:
                keep.append((e, fn))
        self._garbage = keep

    @contextmanager
    def pinned(self):
        e = self.enter()
        try:
            yield e
        finally:
            self.exit(e)


def find_route(gate, table, key):
    e = gate.enter()  # leak: a found route is returned from within the epoch
    node = table.root
    while node is not None:
        if node.key == key:
            return node.value
        node = node.left if key < node.key else node.right
    gate.exit(e)
    return None


def count_routes(gate, table):
    with gate.pinned():  # clean: with exits the epoch
        return sum(1 for _ in table.walk())


class Scanner:
    """Iterates in one epoch and moves on to the newest between batches."""

    def __init__(self, gate, table):
        self.gate = gate
        self.table = table
        self.epoch = gate.enter()  # clean: refresh exits it before the next, close the last

    def refresh(self):
        self.gate.exit(self.epoch)
        self.epoch = self.gate.enter()  # clean: near miss, the field's older epoch was exited

    def close(self):
        self.gate.exit(self.epoch)


class ThreadNumbers:
    """Small numbers for threads: the lowest zero bit."""

    def __init__(self, limit=64):
        self._mask = 0
        self._limit = limit
        self._lock = threading.Lock()

    def occupy(self):
        with self._lock:
            i = (~self._mask & (self._mask + 1)).bit_length() - 1
            if i >= self._limit:
                raise Refused("too many threads")
            self._mask |= 1 << i
            return i

    def vacate(self, i):
        with self._lock:
            assert self._mask >> i & 1, i
            self._mask &= ~(1 << i)

    @property
    def in_use(self):
        return self._mask.bit_count()


def worker_main(numbers, inbox, handle):
    me = numbers.occupy()  # leak: the stop message ends the thread without vacate
    while True:
        msg = inbox.get()
        if msg == "stop":
            return
        if msg == "leave":
            break
        handle(me, msg)
    numbers.vacate(me)


def helper_main(numbers, inbox, handle):
    me = numbers.occupy()  # clean: every break leads to vacate
    while True:
        msg = inbox.get()
        if msg is None:
            break
        if not handle(me, msg):
            break
    numbers.vacate(me)


def renumber(numbers, old):
    new = numbers.occupy()  # clean: one of both is vacated, the other returned
    if new < old:
        numbers.vacate(old)
        return new
    numbers.vacate(new)
    return old


class TimerHandle:
    __slots__ = ("_wheel", "due", "fn", "seq")

    def __init__(self, wheel, due, fn, seq):
        self._wheel, self.due, self.fn, self.seq = wheel, due, fn, seq

    def __lt__(self, other):
        return (self.due, self.seq) < (other.due, other.seq)

    def disarm(self):
        self._wheel._armed.discard(self)


class PeriodicWheel:
    """Armed timers fire again and again until they are disarmed."""

    def __init__(self):
        self._heap = []
        self._armed = set()
        self._seq = itertools.count()
        self.now = 0

    def arm(self, period, fn):
        t = TimerHandle(self, self.now + period, fn, next(self._seq))
        self._armed.add(t)
        heapq.heappush(self._heap, (t, period))
        return t

    def advance(self, ticks):
        self.now += ticks
        while self._heap and self._heap[0][0].due <= self.now:
            t, period = heapq.heappop(self._heap)
            if t in self._armed:
                t.fn()
                t.due += period
                heapq.heappush(self._heap, (t, period))


class Heartbeat:
    def __init__(self, wheel):
        self.wheel = wheel
        self.timer = None

    def start(self, fn):
        self.timer = self.wheel.arm(5, fn)  # leak: a second start overwrites the armed timer

    def stop(self):
        if self.timer is not None:
            self.timer.disarm()
            self.timer = None


class Lease:
    def __init__(self, wheel, renew):
        self.wheel = wheel
        self.renew = renew
        self.timer = None

    def start(self, period):
        if self.timer is None:
            self.timer = self.wheel.arm(period, self.renew)  # clean: near miss, a second start arms nothing and stop disarms

    def stop(self):
        if self.timer is not None:
            self.timer.disarm()
            self.timer = None


def wait_ready(wheel, probe, limit):
    hits = []
    timer = wheel.arm(1, lambda: hits.append(probe()))  # leak: only the way that runs out disarms it
    for _ in range(limit):
        wheel.advance(1)
        if hits and hits[-1]:
            return True
    timer.disarm()
    return False


class WorkQueue:
    """Jobs that are taken and done."""

    def __init__(self):
        self._jobs = []
        self._n = itertools.count()

    def submit(self, job, priority=0):
        heapq.heappush(self._jobs, (-priority, next(self._n), job))

    def claim(self):
        return heapq.heappop(self._jobs)[2] if self._jobs else None


def drain_jobs(work, run, skip):
    done = 0
    while True:
        job = work.claim()  # clean: a job is consumed, not lent
        if job is None:
            return done
        if skip(job):
            continue
        run(job)
        done += 1
