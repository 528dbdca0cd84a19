# Session pooling for the feature store's relational side.
#
#   RawPool          sockets
#   TenantPool       sets the tenant on a raw session
#   TracedPool       counts what goes in and out of any pool
#   UnitOfWork       begin / commit / rollback on a session

import time
import threading


class PoolTimeout(Exception):
    pass


class TenantUnknown(KeyError):
    pass


class RawSession:
    def __init__(self):
        self.tenant = None
        self.in_tx = False
        self.used_at = 0.0

    def execute(self, sql, *args):
        self.used_at = time.time()
        return []

    def begin(self):
        self.in_tx = True

    def commit(self):
        self.in_tx = False

    def rollback(self):
        self.in_tx = False


class RawPool:
    def __init__(self, size):
        self._sem = threading.BoundedSemaphore(size)
        self._stack = []
        self._guard = threading.Lock()

    def checkout(self, timeout=10.0):
        if not self._sem.acquire(timeout=timeout):  # clean: near miss, the permit goes with the session and checkin releases it
            raise PoolTimeout(timeout)
        with self._guard:
            if self._stack:
                return self._stack.pop()  # clean: returned to the caller
        return RawSession()

    def checkout_warm(self):
        """Only a session that was used before; None otherwise."""
        if not self._sem.acquire(blocking=False):  # leak: an empty stack returns None with the permit taken
            return None
        with self._guard:
            if not self._stack:
                return None
            return self._stack.pop()  # clean: returned to the caller

    def checkin(self, session):
        with self._guard:
            self._stack.append(session)
        self._sem.release()


class TenantPool:
    def __init__(self, raw, tenants):
        self._raw = raw
        self._tenants = tenants

    def checkout(self, tenant, timeout=10.0):
        session = self._raw.checkout(timeout)  # leak: an unknown tenant raises with the raw session out
        if tenant not in self._tenants:
            raise TenantUnknown(tenant)
        session.tenant = tenant
        return session

    def checkout_verified(self, tenant):
        session = self._raw.checkout()  # clean: checked in before the raise, otherwise returned
        if tenant not in self._tenants:
            self._raw.checkin(session)
            raise TenantUnknown(tenant)
        session.tenant = tenant
        return session

    def checkin(self, session):
        session.tenant = None
        self._raw.checkin(session)


class TracedPool:
    def __init__(self, inner):
        self._inner = inner
        self.outstanding = 0
        self.slow = 0

    def checkout(self, *args, **kw):
        t0 = time.monotonic()
        s = self._inner.checkout(*args, **kw)  # clean: only counted here and returned to the caller
        self.outstanding += 1
        if time.monotonic() - t0 > 1.0:
            self.slow += 1
        return s

    def checkin(self, s):
        self.outstanding -= 1
        self._inner.checkin(s)


class UnitOfWork:
    """with UnitOfWork(pool, tenant) as s: ..."""

    def __init__(self, pool, tenant, readonly=False):
        self.pool = pool
        self.tenant = tenant
        self.readonly = readonly
        self.session = None

    def __enter__(self):
        self.session = self.pool.checkout(self.tenant)  # leak: __exit__ returns before checkin when readonly
        if not self.readonly:
            self.session.begin()
        return self.session

    def __exit__(self, etype, exc, tb):
        if self.readonly:
            return False
        if etype is None:
            self.session.commit()
        else:
            self.session.rollback()
        self.pool.checkin(self.session)
        return False


class ReadSession:
    def __init__(self, pool, tenant):
        self.pool = pool
        self.tenant = tenant

    def __enter__(self):
        self.session = self.pool.checkout(self.tenant)  # clean: near miss, the early return of __exit__ is after the checkin
        return self.session

    def __exit__(self, etype, exc, tb):
        self.pool.checkin(self.session)
        if etype is None:
            return False
        return issubclass(etype, PoolTimeout)


class FeatureRepo:
    def __init__(self, pool):
        self.pool = pool

    def get(self, tenant, key):
        with ReadSession(self.pool, tenant) as s:  # clean: context manager
            rows = s.execute("select v from features where k = %s", key)
            return rows[0] if rows else None

    def put(self, tenant, key, value, session=None):
        own = session is None
        if own:
            session = self.pool.checkout(tenant)  # clean: near miss, ownership flag, checked in below under own
        try:
            session.execute("insert into features values (%s, %s)", key, value)
        finally:
            if own:
                self.pool.checkin(session)

    def put_all(self, tenant, pairs, session=None):
        if session is None:
            session = self.pool.checkout(tenant)  # leak: the flag below is computed after session was set, so it is never checked in
        owned = session is None
        for k, v in pairs:
            session.execute("insert into features values (%s, %s)", k, v)
        if owned:
            self.pool.checkin(session)

    def copy(self, src, dst):
        reader = self.pool.checkout(src)  # leak: PoolTimeout for the writer is caught and the reader stays out
        try:
            writer = self.pool.checkout(dst)  # clean: checked in at the end
        except PoolTimeout:
            return 0
        n = 0
        for row in reader.execute("select k, v from features"):
            writer.execute("insert into features values (%s, %s)", *row)
            n += 1
        self.pool.checkin(writer)
        self.pool.checkin(reader)
        return n
