"""In-memory stand-in for the coordination store: keys under leases that have to be revoked."""
import itertools
import threading
import time


class StoreClosed(Exception):
    pass


class KeyTaken(Exception):
    pass


class Lease:
    def __init__(self, store, lid, ttl):
        self.store, self.lid, self.ttl = store, lid, ttl
        self.deadline = time.monotonic() + ttl
        self.keys = set()

    def keepalive(self):
        self.deadline = time.monotonic() + self.ttl

    def revoke(self):
        self.store.revoke(self)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.revoke()


class Store:
    MAX_LEASES = 1024

    def __init__(self):
        self._ids = itertools.count(1)
        self._leases = {}
        self._data = {}
        self._lock = threading.RLock()
        self.closed = False

    def grant(self, ttl):
        with self._lock:
            if self.closed or len(self._leases) >= self.MAX_LEASES:
                raise StoreClosed
            lease = Lease(self, next(self._ids), ttl)
            self._leases[lease.lid] = lease
            return lease

    def put_new(self, key, value, lease):
        with self._lock:
            if key in self._data:
                raise KeyTaken(key)
            self._data[key] = value
            lease.keys.add(key)

    def get(self, key, default=None):
        return self._data.get(key, default)

    def prefix(self, pre):
        with self._lock:
            return {k: v for k, v in self._data.items() if k.startswith(pre)}

    def revoke(self, lease):
        with self._lock:
            if self._leases.pop(lease.lid, None) is None:
                return
            for key in lease.keys:
                self._data.pop(key, None)


def leader(store, me, work, ttl=10.0):
    """Run work() as leader if nobody else is; True when it ran."""
    lease = store.grant(ttl)  # leak: when the key is taken the handler returns with the lease in force
    try:
        store.put_new("leader", me, lease)
    except KeyTaken:
        return False
    try:
        work(lease)
    finally:
        lease.revoke()
    return True


def once(store, key, value, ttl):
    with store.grant(ttl) as lease:  # clean: __exit__ revokes, also after KeyTaken
        try:
            store.put_new(key, value, lease)
        except KeyTaken:
            return store.get(key)
        return value
