"""Token shards as streams of rows. Mostly generators over a small file handle pool."""
import collections
import logging
import os
import random
import struct
import time

import numpy as np

log = logging.getLogger("shards")

MAGIC = struct.Struct("<4sHI")
LENGTH = struct.Struct("<I")
VERSION = 3


class TooManyOpen(RuntimeError):
    pass


class ShardCorrupt(ValueError):
    pass


class HandlePool:
    """Bounded number of open shard files. Idle files wait by path for their next user."""

    def __init__(self, limit):
        self.limit = limit
        self.busy = 0
        self.idle = collections.OrderedDict()

    def _stale(self, f, path):
        return os.fstat(f.fileno()).st_ino != os.stat(path).st_ino

    def _make_room(self):
        while self.idle and self.busy + len(self.idle) >= self.limit:
            _, old = self.idle.popitem(last=False)  # clean: closed at once
            old.close()
        if self.busy >= self.limit:
            raise TooManyOpen("%d shard files are open" % self.busy)

    def checkout(self, path):
        f = self.idle.pop(path, None)  # leak: a stale file is replaced by a fresh one and nobody closes it
        if f is None or self._stale(f, path):
            self._make_room()
            f = open(path, "rb")  # clean: returned to the caller
        self.busy += 1
        f.seek(0)
        return f

    def checkin(self, path, f):
        self.busy -= 1
        if path in self.idle:
            f.close()
        else:
            self.idle[path] = f

    def close(self):
        for f in self.idle.values():
            f.close()
        self.idle.clear()


def read_head(f, path):
    magic, version, count = MAGIC.unpack(f.read(MAGIC.size))
    if magic != b"TOKS":
        raise ShardCorrupt("%s: magic %r" % (path, magic))
    return version, count


def read_row(f):
    (length,) = LENGTH.unpack(f.read(LENGTH.size))
    return np.frombuffer(f.read(length * 2), dtype=np.uint16)


def rows(pool, path):
    f = pool.checkout(path)  # clean: near miss, the finally also runs when the consumer stops early
    try:
        version, count = read_head(f, path)
        if version != VERSION:
            return
        for _ in range(count):
            yield read_row(f)
    finally:
        pool.checkin(path, f)


def heads(pool, paths):
    """(path, row count) of each shard of the current version."""
    for path in paths:
        f = pool.checkout(path)  # leak: a shard of another version goes on to the next with its handle out
        magic, version, count = MAGIC.unpack(f.read(MAGIC.size))
        if version != VERSION:
            log.warning("%s has version %d", path, version)
            continue
        pool.checkin(path, f)
        yield path, count


def windows(pool, path, length):
    """Fixed windows over the raw tokens, without row borders."""
    f = pool.checkout(path)  # leak: first_windows() breaks off and the generator has no finally
    f.seek(MAGIC.size)
    while True:
        raw = f.read(length * 2)
        if len(raw) < length * 2:
            break
        yield np.frombuffer(raw, dtype=np.uint16)
    pool.checkin(path, f)


def first_windows(pool, path, length, count):
    found = []
    for window in windows(pool, path, length):
        found.append(window)
        if len(found) == count:
            break
    return np.stack(found)


def probe(pool, paths):
    missing = []
    for path in paths:
        try:
            f = pool.checkout(path)  # clean: near miss, in the handler nothing was opened
        except FileNotFoundError:
            missing.append(path)
            continue
        pool.checkin(path, f)
    return missing


def checkout_checked(pool, path, tries=3):
    """For network file systems that show a file before its contents."""
    for attempt in range(tries):
        f = pool.checkout(path)  # leak: a failed check tries again and forgets the handle
        try:
            read_head(f, path)
        except ShardCorrupt as exc:
            log.info("attempt %d: %s", attempt, exc)
            time.sleep(0.2 * (attempt + 1))
            continue
        return f
    raise ShardCorrupt("%s: still bad after %d tries" % (path, tries))


def count_tokens(pool, path):
    f = checkout_checked(pool, path)  # clean: checked in after the size is known
    size = os.fstat(f.fileno()).st_size
    pool.checkin(path, f)
    return (size - MAGIC.size) // 2


def same_rows(pool, left, right):
    a = pool.checkout(left)  # clean: checked in when the second is refused and in the finally
    try:
        b = pool.checkout(right)  # clean: checked in in the finally
    except TooManyOpen:
        pool.checkin(left, a)
        raise
    try:
        _, count = read_head(a, left)
        _, other = read_head(b, right)
        if count != other:
            return False
        return all(np.array_equal(read_row(a), read_row(b)) for _ in range(count))
    finally:
        pool.checkin(left, a)
        pool.checkin(right, b)


class Interleaver:
    """Draws rows from `width` shards at a time in a seeded random order."""

    def __init__(self, pool, paths, width, seed):
        self.pool = pool
        self.waiting = collections.deque(paths)
        self.random = random.Random(seed)
        self.active = []
        for _ in range(width):
            if not self._refill():
                break

    def _refill(self):
        while self.waiting:
            path = self.waiting.popleft()
            try:
                f = self.pool.checkout(path)  # clean: near miss, lives in the active list or goes back when the shard is empty
            except TooManyOpen:
                self.waiting.appendleft(path)
                return False
            _, count = MAGIC.unpack(f.read(MAGIC.size))[1:]
            if count == 0:
                self.pool.checkin(path, f)
                continue
            self.active.append([path, f, count])
            return True
        return False

    def __iter__(self):
        return self

    def __next__(self):
        while self.active:
            i = self.random.randrange(len(self.active))
            path, f, left = self.active[i]
            if left:
                self.active[i][2] -= 1
                return read_row(f)
            self.pool.checkin(path, f)
            del self.active[i]
            self._refill()
        raise StopIteration

    def close(self):
        for path, f, _ in self.active:
            self.pool.checkin(path, f)
        self.active.clear()


def length_histogram(pool, paths, seed=0):
    mix = Interleaver(pool, paths, 4, seed)  # clean: closed in the finally
    counts = collections.Counter()
    try:
        for row in mix:
            counts[len(row) // 256] += 1
    finally:
        mix.close()
    return counts


def batches(pool, paths, size, limit, sink):
    """Feed `sink` with at most `limit` batches; True when the data lasted."""
    mix = Interleaver(pool, paths, 8, seed=limit)  # leak: the return at the limit leaves the active handles out
    batch = []
    sent = 0
    for row in mix:
        batch.append(row)
        if len(batch) == size:
            sink(batch)
            batch = []
            sent += 1
            if sent == limit:
                return True
    mix.close()
    return False
