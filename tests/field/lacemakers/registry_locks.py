"""Leases on model registry entries: advisory locks by name, read/write leases and guards around them."""
import contextlib
import logging
import threading
import time
import uuid

log = logging.getLogger("registry")


class LeaseLost(Exception):
    pass


class LockServer:
    """Grants a token per name until it is surrendered. Tokens do not expire: the fencing job looks at them by hand."""

    def __init__(self):
        self._owners = {}
        self._mu = threading.Lock()

    def grant(self, name):
        with self._mu:
            if name in self._owners:
                return None
            token = uuid.uuid4().hex
            self._owners[name] = token
            return token

    def surrender(self, name, token):
        with self._mu:
            if self._owners.get(name) == token:
                del self._owners[name]

    def grant_wait(self, name, timeout):
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            token = self.grant(name)  # clean: only None goes round again
            if token is not None:
                return token
            time.sleep(0.02)
        return None

    def grant_all(self, names):
        """All or nothing."""
        tokens = {}
        for name in sorted(names):
            token = self.grant(name)  # clean: near miss, those before a failure are surrendered
            if token is None:
                for n, t in tokens.items():
                    self.surrender(n, t)
                return None
            tokens[name] = token
        return tokens

    def grant_each(self, names):
        tokens = {}
        for name in names:
            tokens[name] = self.grant_wait(name, 1.0)  # leak: a timeout raises over the tokens got before it
            if tokens[name] is None:
                raise LeaseLost(name)
        return tokens


class EntryGuard:
    """with EntryGuard(server, name) as token: ..."""

    def __init__(self, server, name, timeout=5.0):
        self.server = server
        self.name = name
        self.timeout = timeout
        self.token = None

    def __enter__(self):
        self.token = self.server.grant_wait(self.name, self.timeout)  # clean: surrendered in __exit__
        if self.token is None:
            raise LeaseLost(self.name)
        return self.token

    def __exit__(self, et, ev, tb):
        self.server.surrender(self.name, self.token)
        self.token = None
        return False


class CommitGuard:
    """Holds the entry during a publish and writes the audit line at the end."""

    def __init__(self, server, name, audit):
        self.server = server
        self.name = name
        self.audit = audit
        self.token = None

    def __enter__(self):
        self.token = self.server.grant(self.name)  # leak: __exit__ returns on an exception before surrendering
        if self.token is None:
            raise LeaseLost(self.name)
        return self

    def __exit__(self, et, ev, tb):
        if et is not None:
            log.error("publish of %s failed: %s", self.name, ev)
            return False
        self.audit.append((self.name, self.token))
        self.server.surrender(self.name, self.token)
        return False


class RWLease:
    """Many readers or one writer on one entry."""

    def __init__(self):
        self._cv = threading.Condition()
        self._readers = 0
        self._writer = False

    def begin_read(self):
        with self._cv:
            while self._writer:
                self._cv.wait()
            self._readers += 1

    def end_read(self):
        with self._cv:
            self._readers -= 1
            self._cv.notify_all()

    def try_write(self):
        with self._cv:
            if self._writer or self._readers:
                return False
            self._writer = True
            return True

    def end_write(self):
        with self._cv:
            self._writer = False
            self._cv.notify_all()

    @contextlib.contextmanager
    def reading(self):
        self.begin_read()  # clean: ended in finally
        try:
            yield
        finally:
            self.end_read()

    @contextlib.contextmanager
    def reading_quiet(self):
        self.begin_read()  # leak: an exception in the body comes out at the yield and passes over end_read
        yield
        self.end_read()


class Registry:
    def __init__(self, server, store):
        self.server = server
        self.store = store
        self.entries = {}
        self._leases = {}
        self._io = threading.Lock()

    def publish(self, name, blob):
        with EntryGuard(self.server, name):  # clean: context manager
            version = self.store.put(name, blob)
            self.entries[name] = version
            return version

    def publish_many(self, blobs):
        tokens = self.server.grant_all(blobs)  # clean: all surrendered in finally
        if tokens is None:
            return False
        try:
            for name, blob in blobs.items():
                self.entries[name] = self.store.put(name, blob)
        finally:
            for name, token in tokens.items():
                self.server.surrender(name, token)
        return True

    def delete(self, name):
        token = self.server.grant(name)  # leak: entries with pinned versions return without surrender
        if token is None:
            return False
        if self.store.pinned(name):
            log.info("%s is pinned", name)
            return False
        self.store.delete(name)
        self.entries.pop(name, None)
        self.server.surrender(name, token)
        return True

    def rename(self, old, new):
        a = self.server.grant(old)  # clean: near miss, surrendered on each of the ways out
        if a is None:
            return False
        b = self.server.grant(new)  # leak: an existing target surrenders only the old name
        if b is None:
            self.server.surrender(old, a)
            return False
        if new in self.entries:
            self.server.surrender(old, a)
            return False
        self.store.rename(old, new)
        self.entries[new] = self.entries.pop(old)
        self.server.surrender(new, b)
        self.server.surrender(old, a)
        return True

    def load(self, name):
        lease = self._leases.setdefault(name, RWLease())
        with lease.reading():  # clean: context manager
            return self.store.get(name)

    def load_meta(self, name):
        lease = self._leases.setdefault(name, RWLease())
        lease.begin_read()  # leak: unknown names return before end_read
        meta = self.store.meta(name)
        if meta is None:
            return {}
        lease.end_read()
        return dict(meta)

    def rewrite(self, name, fn):
        lease = self._leases.setdefault(name, RWLease())
        if not lease.try_write():  # clean: False means nothing taken, else ended in finally
            return False
        try:
            self.store.put(name, fn(self.store.get(name)))
            return True
        finally:
            lease.end_write()

    def swap_store(self, store):
        self._io.acquire()  # leak: the same store returns with the lock held
        if store is self.store:
            return
        self.store = store
        self._io.release()
