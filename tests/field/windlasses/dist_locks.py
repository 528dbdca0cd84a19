"""Distributed locks for checkpoint writers, on a key/value service.

KV is the thin client; LockManager hands out grants.  A grant has to be
released by its holder: the service has no TTL (see RUNBOOK, "stuck locks").
"""
import contextlib
import logging
import threading
import time
import uuid

_log = logging.getLogger("locks")


class KV:
    def __init__(self):
        self._d = {}
        self._mu = threading.Lock()

    def put_if_absent(self, k, v):
        with self._mu:
            if k in self._d:
                return False
            self._d[k] = v
            return True

    def delete_if(self, k, v):
        with self._mu:
            if self._d.get(k) == v:
                del self._d[k]
                return True
            return False

    def get(self, k, default=None):
        with self._mu:
            return self._d.get(k, default)


class Grant:
    __slots__ = ("key", "owner", "fence", "count")

    def __init__(self, key, owner, fence):
        self.key = key
        self.owner = owner
        self.fence = fence
        self.count = 1


class LockManager:
    def __init__(self, kv, node):
        self.kv = kv
        self.node = node
        self._fence = 0
        self._held = {}

    def try_lock(self, key):
        owner = f"{self.node}:{uuid.uuid4().hex[:8]}"
        if not self.kv.put_if_absent(key, owner):  # clean: the grant carries key and owner to the caller
            return None
        self._fence += 1
        return Grant(key, owner, self._fence)

    def lock(self, key, timeout, poll=0.05):
        end = time.monotonic() + timeout
        while True:
            g = self.try_lock(key)  # clean: returned
            if g is not None or time.monotonic() >= end:
                return g
            time.sleep(poll)

    def lock_newer(self, key, min_fence):
        """A grant whose fence is at least min_fence, else None."""
        g = self.try_lock(key)  # leak: a grant with a small fence is thrown away still locked
        if g is None or g.fence < min_fence:
            return None
        return g

    def unlock(self, g):
        if not self.kv.delete_if(g.key, g.owner):
            _log.warning("lost lock %s", g.key)

    # re-entrant use, counted on the grant

    def enter(self, key, timeout):
        g = self._held.get(key)
        if g is not None:
            g.count += 1
            return g
        g = self.lock(key, timeout)  # clean: near miss, kept in _held, leave() unlocks at count zero
        if g is not None:
            self._held[key] = g
        return g

    def leave(self, key):
        g = self._held[key]
        g.count -= 1
        if g.count == 0:
            del self._held[key]
            self.unlock(g)

    @contextlib.contextmanager
    def guard(self, key, timeout=10.0):
        g = self.lock(key, timeout)  # clean: finally
        if g is None:
            raise TimeoutError(key)
        try:
            yield g
        finally:
            self.unlock(g)


class MultiLock:
    """All keys or none, in sorted order."""

    def __init__(self, mgr, keys):
        self.mgr = mgr
        self.keys = sorted(keys)
        self.grants = []

    def acquire(self, timeout):
        for key in self.keys:
            g = self.mgr.lock(key, timeout)  # clean: earlier grants are undone by release() on a timeout
            if g is None:
                self.release()
                return False
            self.grants.append(g)
        return True

    def acquire_now(self):
        grants = []
        for key in self.keys:
            g = self.mgr.try_lock(key)  # leak: earlier grants sit in a local list when a later key is taken
            if g is None:
                return False
            grants.append(g)
        self.grants = grants
        return True

    def release(self):
        while self.grants:
            self.mgr.unlock(self.grants.pop())


class CheckpointWriter:
    def __init__(self, mgr, store):
        self.mgr = mgr
        self.store = store
        self.io = threading.Lock()
        self.lease = None

    def write(self, step, blob):
        g = self.mgr.lock(f"ckpt/{step}", 5.0)  # leak: an existing checkpoint returns with the lock held
        if g is None:
            return False
        if step in self.store:
            return False
        self.store[step] = (g.fence, blob)
        self.mgr.unlock(g)
        return True

    def write_many(self, blobs):
        written = []
        for step, blob in blobs.items():
            g = self.mgr.try_lock(f"ckpt/{step}")  # clean: near miss, unlocked in finally also on the continue
            if g is None:
                continue
            try:
                if step in self.store:
                    continue
                self.store[step] = (g.fence, blob)
                written.append(step)
            finally:
                self.mgr.unlock(g)
        return written

    def prune(self, keep):
        for step in sorted(self.store)[:-keep]:
            g = self.mgr.try_lock(f"ckpt/{step}")  # leak: break on a tagged checkpoint skips the unlock
            if g is None:
                continue
            if self.store[step][1] is None:
                break
            del self.store[step]
            self.mgr.unlock(g)

    def local_dump(self, path, blob):
        self.io.acquire()  # leak: the empty-blob return does not release the mutex
        if not blob:
            return 0
        with open(path, "wb") as fh:  # clean: with
            n = fh.write(blob)
        self.io.release()
        return n

    # leadership: one writer per job

    def campaign(self, job):
        if self.lease is not None:
            return True
        self.lease = self.mgr.try_lock(f"leader/{job}")  # clean: near miss, kept as self.lease, resign() unlocks
        return self.lease is not None

    def resign(self):
        if self.lease is not None:
            self.mgr.unlock(self.lease)
            self.lease = None

    def publish(self, key, value):
        with self.mgr.guard(f"pub/{key}"):  # clean: guard() unlocks
            self.store[key] = value


def rename(mgr, store, old, new):
    a = mgr.lock(old, 2.0)  # clean: unlocked on the failures and at the end
    if a is None:
        return False
    b = mgr.lock(new, 2.0)  # leak: only a is unlocked when old does not exist
    if b is None:
        mgr.unlock(a)
        return False
    if old not in store:
        mgr.unlock(a)
        return False
    store[new] = store.pop(old)
    mgr.unlock(b)
    mgr.unlock(a)
    return True


def nested_update(mgr, store, key, fn):
    g = mgr.enter(key, 2.0)  # clean: leave() on both paths
    if g is None:
        return False
    if key not in store:
        mgr.leave(key)
        return False
    store[key] = fn(store[key])
    mgr.leave(key)
    return True


def nested_swap(mgr, store, key, value):
    g = mgr.enter(key, 2.0)  # leak: the unchanged-value return forgets leave(), the count never falls to zero
    if g is None:
        return None
    old = store.get(key)
    if old == value:
        return old
    store[key] = value
    mgr.leave(key)
    return old
