"""Leases on model replicas, and on the file slots that results are written through."""
import os
import threading
import time
import uuid
from contextlib import contextmanager


class NoReplica(Exception):
    pass


class LeaseExpired(Exception):
    pass


class Lease:
    def __init__(self, book, replica, ttl):
        self.book = book
        self.replica = replica
        self.id = uuid.uuid4().hex
        self.until = time.monotonic() + ttl

    def check(self):
        if time.monotonic() > self.until:
            raise LeaseExpired(self.id)
        return self.replica

    def surrender(self):
        self.book._surrender(self)


class LeaseBook:
    def __init__(self, replicas, ttl=300.0):
        self._idle = {model: list(urls) for model, urls in replicas.items()}
        self._lent = {}
        self._ttl = ttl
        self._lock = threading.Condition()

    def lease(self, model, wait=None):
        with self._lock:
            if model not in self._idle:
                raise NoReplica("unknown model %s" % model)
            if not self._lock.wait_for(lambda: self._idle[model], wait):
                raise NoReplica("all replicas of %s are lent" % model)
            replica = self._idle[model].pop()  # clean: recorded in _lent under the lease that is returned
            lease = Lease(self, (model, replica), self._ttl)
            self._lent[lease.id] = lease
        return lease

    def lease_any(self, models):
        """The first of several models that has an idle replica, or None."""
        for model in models:
            with self._lock:
                if self._idle.get(model):
                    lease = Lease(self, (model, self._idle[model].pop()), self._ttl)  # clean: recorded and returned
                    self._lent[lease.id] = lease
                    return lease
        return None

    def drain(self, model, probe):
        """Take idle replicas out one by one and put back those that still answer."""
        alive = []
        with self._lock:
            while self._idle[model]:
                replica = self._idle[model].pop()  # clean: near miss, a replica that does not answer is removed on purpose
                if probe(replica):
                    alive.append(replica)
            self._idle[model] = alive
            self._lock.notify_all()
        return len(alive)

    def _surrender(self, lease):
        with self._lock:
            if self._lent.pop(lease.id, None) is None:
                return
            model, replica = lease.replica
            self._idle[model].append(replica)
            self._lock.notify()

    def renew(self, lease):
        """A new lease on the same replica; the old one is void from here on."""
        with self._lock:
            if self._lent.pop(lease.id, None) is None:
                raise LeaseExpired(lease.id)
            fresh = Lease(self, lease.replica, self._ttl)  # clean: replaces the entry that was popped and is returned
            self._lent[fresh.id] = fresh
        return fresh


class ResultSlots:
    """At most n result files are open at a time."""

    def __init__(self, folder, n):
        self.folder = folder
        self._sem = threading.BoundedSemaphore(n)

    def open(self, name, append=False):
        self._sem.acquire()  # leak: a file that exists already returns None from the handler without the release
        try:
            fh = open(os.path.join(self.folder, name), "a" if append else "x")  # clean: returned, done() closes it
        except FileExistsError:
            return None
        return fh

    def done(self, fh):
        fh.close()
        self._sem.release()

    @contextmanager
    def appending(self, name):
        fh = self.open(name, append=True)  # clean: None comes only for "x" and the finally does the rest
        try:
            yield fh
        finally:
            self.done(fh)
