"""Per-shard locks and reader counts for the parameter server."""
import threading
import time


class ShardLock:
    def __init__(self):
        self._mutex = threading.Lock()
        self._readers = 0
        self._gate = threading.Condition(threading.Lock())

    def lock(self, blocking=True):
        return self._mutex.acquire(blocking)  # clean: the caller owns the mutex when this is true

    def unlock(self):
        self._mutex.release()

    def enter_read(self, timeout=0.5):
        if not self._mutex.acquire(timeout=timeout):  # clean: near miss, the failing branch does not own it
            return False
        self._readers += 1
        self._mutex.release()
        return True

    def leave_read(self):
        with self._gate:
            self._readers -= 1
            self._gate.notify_all()

    def upgrade(self, limit):
        self._mutex.acquire()  # leak: gives up on busy readers with the mutex held
        deadline = time.monotonic() + limit
        while self._readers > 1:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        self._mutex.release()
        return True


class ShardMap:
    def __init__(self, n):
        self.locks = [ShardLock() for _ in range(n)]
        self.data = [dict() for _ in range(n)]

    def index(self, key):
        return hash(key) % len(self.locks)


class ParameterServer:
    def __init__(self, shards):
        self._shards = shards
        self._stats = {}

    def get(self, key):
        i = self._shards.index(key)
        lock = self._shards.locks[i]
        if not lock.enter_read():  # leak: a missing key returns before leave_read
            return None
        value = self._shards.data[i].get(key)
        if value is None:
            return None
        lock.leave_read()
        return value

    def get_default(self, key, default):
        i = self._shards.index(key)
        lock = self._shards.locks[i]
        if not lock.enter_read():  # clean: near miss, returns inside the try still leave
            return default
        try:
            if key not in self._shards.data[i]:
                return default
            return self._shards.data[i][key]
        finally:
            lock.leave_read()

    def put(self, key, value, only_new=False):
        i = self._shards.index(key)
        self._shards.locks[i].lock()  # leak: with only_new an existing key returns before the unlock
        if only_new and key in self._shards.data[i]:
            return False
        self._shards.data[i][key] = value
        self._shards.locks[i].unlock()
        return True

    def try_put(self, key, value):
        i = self._shards.index(key)
        lock = self._shards.locks[i]
        owned = lock.lock(blocking=False)  # clean: near miss, unlocked exactly when owned
        if owned:
            self._shards.data[i][key] = value
        else:
            self._stats[key] = self._stats.get(key, 0) + 1
        if owned:
            lock.unlock()
        return owned

    def move(self, key, dst):
        src = self._shards.index(key)
        first, second = sorted((src, dst))
        self._shards.locks[first].lock()  # leak: the missing-key return leaves it locked as well
        if first != second:
            self._shards.locks[second].lock()  # leak: the missing-key return leaves it locked
        value = self._shards.data[src].pop(key, None)
        if value is None:
            return False
        self._shards.data[dst][key] = value
        if first != second:
            self._shards.locks[second].unlock()
        self._shards.locks[first].unlock()
        return True

    def swap(self, i, j, key):
        lo, hi = min(i, j), max(i, j)
        self._shards.locks[lo].lock()  # clean: unlocked last
        if hi != lo:
            self._shards.locks[hi].lock()  # clean: near miss, the same comparison guards its unlock
        a, b = self._shards.data[i], self._shards.data[j]
        if key in a and key in b:
            a[key], b[key] = b[key], a[key]
        if hi != lo:
            self._shards.locks[hi].unlock()
        self._shards.locks[lo].unlock()

    def freeze(self):
        frozen = []
        for lock in self._shards.locks:
            if not lock.lock(blocking=False):  # clean: near miss, what was locked before is unlocked on failure and handed out on success
                for held in frozen:
                    held.unlock()
                return None
            frozen.append(lock)
        return frozen

    def snapshot(self):
        frozen = self.freeze()  # clean: thawed after copying
        if frozen is None:
            return None
        copies = [dict(d) for d in self._shards.data]
        for lock in frozen:
            lock.unlock()
        return copies

    def count(self, predicate):
        frozen = self.freeze()  # leak: only locks of non-empty shards are unlocked
        if frozen is None:
            return -1
        total = 0
        for lock, shard in zip(frozen, self._shards.data):
            if not shard:
                continue
            total += sum(1 for v in shard.values() if predicate(v))
            lock.unlock()
        return total


def sweep(shards, horizon):
    removed = 0
    for lock, shard in zip(shards.locks, shards.data):
        if not lock.lock(blocking=False):  # clean: near miss, the continue is for shards that were not locked
            continue
        stale = [k for k, v in shard.items() if v.stamp < horizon]
        for k in stale:
            del shard[k]
        removed += len(stale)
        lock.unlock()
    return removed
