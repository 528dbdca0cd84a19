"""Connections, frames, statements and locks of the run metadata store."""
from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


class StoreError(Exception):
    pass


class PoolTimeout(StoreError):
    pass


class RawConnection:
    def __init__(self, dsn):
        self.dsn = dsn
        self.broken = False
        self.statements = 0

    def execute(self, sql, args=()):
        if self.broken:
            raise StoreError("connection is gone")
        self.statements += 1
        return []

    def close(self):
        self.broken = True


class ConnectionPool:
    def __init__(self, dsn, size=4):
        self._dsn = dsn
        self._size = size
        self._opened = 0
        self._idle = deque()
        self._cond = threading.Condition()
        self.waits = 0

    def borrow(self, timeout=5.0):
        deadline = time.monotonic() + timeout
        with self._cond:
            while True:
                if self._idle:
                    return self._idle.pop()
                if self._opened < self._size:
                    self._opened += 1
                    return RawConnection(self._dsn)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PoolTimeout(self._dsn)
                self.waits += 1
                self._cond.wait(left)

    def give_back(self, conn):
        with self._cond:
            if conn.broken:
                self._opened -= 1
            else:
                self._idle.append(conn)
            self._cond.notify()


def lookup_shard(pool, name):
    conn = pool.borrow()  # leak: the return for an empty result skips give_back
    rows = conn.execute("select host from shards where name = ?", (name,))
    if not rows:
        return None
    host = rows[0][0]
    pool.give_back(conn)
    return host


def record_metrics(pool, run_id, metrics):
    conn = pool.borrow()  # clean: given back in finally
    try:
        for key, value in metrics.items():
            conn.execute("insert into metrics values (?, ?, ?)", (run_id, key, value))
    finally:
        pool.give_back(conn)


class RunCursor:
    def __init__(self, pool):
        self._pool = pool
        self._conn = None

    def fetch(self, sql):
        if self._conn is not None and self._conn.broken:
            self._pool.give_back(self._conn)
            self._conn = None
        if self._conn is None:
            self._conn = self._pool.borrow()  # clean: near miss, kept in a field that close gives back
        return self._conn.execute(sql)

    def close(self):
        if self._conn is not None:
            self._pool.give_back(self._conn)
            self._conn = None


@dataclass
class Frame:
    page_id: int = -1
    data: bytearray = field(default_factory=lambda: bytearray(4096))
    fixes: int = 0
    dirty: bool = False


class BufferManager:
    """Clock replacement over a fixed number of frames."""

    def __init__(self, disk, nframes=64):
        self._disk = disk
        self._frames = [Frame() for _ in range(nframes)]
        self._where = {}
        self._hand = 0
        self._latch = threading.RLock()

    def fix(self, page_id):
        with self._latch:
            frame = self._where.get(page_id)
            if frame is None:
                frame = self._victim()
                frame.page_id = page_id
                frame.data[:] = self._disk.read(page_id)
                self._where[page_id] = frame
            frame.fixes += 1
            return frame

    def unfix(self, frame, dirty=False):
        with self._latch:
            assert frame.fixes > 0, frame.page_id
            frame.fixes -= 1
            frame.dirty = frame.dirty or dirty

    def _victim(self):
        for _ in range(len(self._frames)):
            self._hand = (self._hand + 1) % len(self._frames)
            frame = self._frames[self._hand]
            if frame.fixes == 0:
                if frame.dirty:
                    self._disk.write(frame.page_id, frame.data)
                    frame.dirty = False
                self._where.pop(frame.page_id, None)
                return frame
        raise StoreError("all frames are fixed")


def count_live_rows(buffers, page_ids):
    total = 0
    for page_id in page_ids:
        frame = buffers.fix(page_id)  # leak: continue for a tombstone page leaves it fixed
        if frame.data[0] == 0xFF:
            continue
        total += frame.data[1]
        buffers.unfix(frame)
    return total


def descend(buffers, root, key):
    frame = buffers.fix(root)  # clean: near miss, crabbing unfixes the parent before it moves on
    while frame.data[0] == 1:
        child = buffers.fix(frame.data[2 + key % 16])  # clean: becomes frame and is returned to the caller
        buffers.unfix(frame)
        frame = child
    return frame


class StatementCache:
    """Prepared statements shared by text; evicts only what nobody uses."""

    def __init__(self, prepare, limit=128):
        self._prepare = prepare
        self._limit = limit
        self._entries = OrderedDict()

    def check_out(self, sql):
        entry = self._entries.get(sql)
        if entry is None:
            self._shrink()
            entry = self._entries[sql] = [self._prepare(sql), 0]
        entry[1] += 1
        self._entries.move_to_end(sql)
        return entry[0]

    def check_in(self, sql):
        entry = self._entries[sql]
        if entry[1] <= 0:
            raise StoreError("statement is not in use")
        entry[1] -= 1

    def _shrink(self):
        while len(self._entries) >= self._limit:
            for sql, entry in self._entries.items():
                if entry[1] == 0:
                    del self._entries[sql]
                    break
            else:
                raise StoreError("statement cache is full")


def explain(cache, sql, verbose):
    stmt = cache.check_out(sql)  # leak: only the verbose branch checks it in
    plan = stmt.plan()
    if verbose:
        text = "\n".join(plan)
        cache.check_in(sql)
        return text
    return plan[0]


def run_many(cache, sqls):
    results = []
    for sql in sqls:
        stmt = cache.check_out(sql)  # leak: a caught StoreError goes on without check_in
        try:
            results.append(stmt.run())
            cache.check_in(sql)
        except StoreError:
            log.warning("skipping %s", sql)
    return results


class LockTable:
    def __init__(self):
        self._owners = {}
        self._by_txn = defaultdict(set)
        self._mutex = threading.Lock()
        self.conflicts = 0

    def grant(self, txn, key):
        with self._mutex:
            owner = self._owners.get(key)
            if owner is not None and owner != txn:
                self.conflicts += 1
                return False
            self._owners[key] = txn
            self._by_txn[txn].add(key)
            return True

    def relinquish(self, txn, key):
        with self._mutex:
            if self._owners.get(key) == txn:
                del self._owners[key]
                self._by_txn[txn].discard(key)

    def relinquish_all(self, txn):
        with self._mutex:
            for key in self._by_txn.pop(txn, ()):
                del self._owners[key]


def rename_run(locks, store, txn_ids, old, new):
    txn = next(txn_ids)
    if not locks.grant(txn, old):  # leak: the second conflict returns with the first key locked
        return False
    if not locks.grant(txn, new):  # clean: relinquished after the move
        return False
    store[new] = store.pop(old)
    locks.relinquish(txn, old)
    locks.relinquish(txn, new)
    return True


def bulk_touch(locks, store, txn, keys):
    try:
        for key in keys:
            if not locks.grant(txn, key):  # clean: near miss, relinquish_all in finally
                return 0
            store[key] = time.time()
        return len(keys)
    finally:
        locks.relinquish_all(txn)


class SnapshotRegistry:
    """Open read snapshots; vacuum may not pass the oldest."""

    def __init__(self):
        self._ticks = itertools.count(1)
        self._open = {}

    def begin_snapshot(self, who):
        snap = next(self._ticks)
        self._open[snap] = who
        return snap

    def end_snapshot(self, snap):
        self._open.pop(snap, None)

    @property
    def horizon(self):
        return min(self._open, default=None)


def export_runs(snapshots, reader, out):
    snap = snapshots.begin_snapshot("export")  # clean: every way passes end_snapshot
    for row in reader.rows(snap):
        if row is None:
            break
        out.append(row)
    snapshots.end_snapshot(snap)


def refresh_view(snapshots, reader, attempts=3):
    snap = snapshots.begin_snapshot("view")  # leak: rebound in the loop, this one is never ended
    for _ in range(attempts):
        rows = reader.rows(snap)
        if rows is not None:
            break
        snap = snapshots.begin_snapshot("view-retry")  # leak: rebound by the next retry
    else:
        rows = []
    snapshots.end_snapshot(snap)
    return rows


class PlanMemo:
    """Remembers plans by query shape."""

    def __init__(self, planner, limit=512):
        self._planner = planner
        self._limit = limit
        self._plans = OrderedDict()

    def obtain(self, shape):
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plans[shape] = self._planner(shape)
            if len(self._plans) > self._limit:
                self._plans.popitem(last=False)
        return plan

    def discard(self, shape):
        self._plans.pop(shape, None)


def estimate(memo, shape, default):
    plan = memo.obtain(shape)  # clean: a memo table, nothing is lent
    if plan.cost is None:
        return default
    return plan.cost
