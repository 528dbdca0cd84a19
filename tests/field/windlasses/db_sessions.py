"""Session pool for the experiment database, and the repositories above it."""
import contextlib
import functools
import queue
import sqlite3
import threading
import time


class PoolTimeout(Exception):
    pass


class StaleRow(Exception):
    pass


class Session:
    def __init__(self, path):
        self.raw = sqlite3.connect(path, check_same_thread=False)  # clean: lives with the session, the pool closes it
        self.tx = False
        self.opened_at = time.time()

    def begin(self):
        self.tx = True

    def commit(self):
        self.raw.commit()
        self.tx = False

    def rollback(self):
        self.raw.rollback()
        self.tx = False

    def one(self, sql, *args):
        return self.raw.execute(sql, args).fetchone()

    def all(self, sql, *args):
        return self.raw.execute(sql, args).fetchall()

    def run(self, sql, *args):
        return self.raw.execute(sql, args).rowcount


class SessionPool:
    def __init__(self, path, size, max_age=3600.0):
        self.path = path
        self.max_age = max_age
        self._q = queue.LifoQueue()
        for _ in range(size):
            self._q.put(Session(path))

    def checkout(self, timeout=5.0):
        """A session, or PoolTimeout."""
        try:
            s = self._q.get(timeout=timeout)  # clean: returned, or renewed first when too old
        except queue.Empty:
            raise PoolTimeout(self.path) from None
        if time.time() - s.opened_at > self.max_age:
            s.raw.close()
            s = Session(self.path)
        return s

    def checkout_nowait(self):
        try:
            s = self._q.get_nowait()  # leak: a session with an open transaction is rolled back but not put back
        except queue.Empty:
            return None
        if s.raw.in_transaction:
            s.rollback()
            return None
        return s

    def checkin(self, s):
        if s.tx:
            s.rollback()
        self._q.put(s)

    @contextlib.contextmanager
    def session(self):
        s = self.checkout()  # clean: finally
        try:
            yield s
        finally:
            self.checkin(s)

    def close(self):
        while True:
            try:
                s = self._q.get_nowait()  # clean: closed for good, the pool is going away
            except queue.Empty:
                return
            s.raw.close()


class UnitOfWork:
    """Transaction scope. May be given a session, then it does not own it."""

    def __init__(self, pool, session=None):
        self.pool = pool
        self.owns = session is None
        self.s = session

    def __enter__(self):
        if self.owns:
            self.s = self.pool.checkout()  # clean: near miss, __exit__ checks in under the same owns flag
        self.s.begin()
        return self.s

    def __exit__(self, et, ev, tb):
        if et is None:
            self.s.commit()
        else:
            self.s.rollback()
        if self.owns:
            self.pool.checkin(self.s)
        return False


class ReadScope:
    def __init__(self, pool, swallow=()):
        self.pool = pool
        self.swallow = swallow
        self.s = None

    def __enter__(self):
        self.s = self.pool.checkout()  # leak: __exit__ returns True for a swallowed error before the checkin
        return self.s

    def __exit__(self, et, ev, tb):
        if et is not None and issubclass(et, self.swallow):
            return True
        self.pool.checkin(self.s)
        return False


def with_session(fn):
    """Method decorator; passes a session unless the caller brought one."""
    @functools.wraps(fn)
    def inner(self, *args, session=None):
        owned = session is None
        s = session if not owned else self.pool.checkout()  # clean: near miss, finally checks in exactly when owned
        try:
            return fn(self, s, *args)
        finally:
            if owned:
                self.pool.checkin(s)
    return inner


class RunRepo:
    def __init__(self, pool):
        self.pool = pool
        self._cursors = {}
        self._mu = threading.Lock()

    @with_session
    def status(self, s, run_id):
        row = s.one("select status from runs where id=?", run_id)
        return row[0] if row else None

    def metrics(self, run_id):
        s = self.pool.checkout()  # leak: the unknown-run return has no checkin
        if s.one("select 1 from runs where id=?", run_id) is None:
            return []
        rows = s.all("select step, value from metrics where run=?", run_id)
        self.pool.checkin(s)
        return rows

    def set_status(self, run_id, old, new):
        s = self.pool.checkout()  # leak: StaleRow is raised without a checkin
        s.begin()
        n = s.run("update runs set status=? where id=? and status=?", new, run_id, old)
        if n == 0:
            raise StaleRow(run_id)
        s.commit()
        self.pool.checkin(s)

    def touch(self, run_id):
        with UnitOfWork(self.pool) as s:  # clean: __exit__ checks in, also for StaleRow
            n = s.run("update runs set seen=? where id=?", time.time(), run_id)
            if n == 0:
                raise StaleRow(run_id)

    def names(self, ids):
        out = {}
        with self.pool.session() as s:  # clean: context manager
            for i in ids:
                row = s.one("select name from runs where id=?", i)
                if row is None:
                    continue
                out[i] = row[0]
        return out

    # server-side cursors: open_cursor / fetch / close_cursor

    def open_cursor(self, token, sql):
        with self._mu:
            if token in self._cursors:
                return False
            s = self.pool.checkout_nowait()  # clean: near miss, goes to _cursors with its cursor, close_cursor() checks in
            if s is None:
                return False
            self._cursors[token] = (s, s.raw.execute(sql))
            return True

    def fetch(self, token, n):
        pair = self._cursors.get(token)
        return pair[1].fetchmany(n) if pair else []

    def close_cursor(self, token):
        with self._mu:
            pair = self._cursors.pop(token, None)
        if pair is not None:
            self.pool.checkin(pair[0])

    def pages(self, sql, n):
        s = self.pool.checkout()  # clean: finally runs at exhaustion and at generator close
        try:
            cur = s.raw.execute(sql)
            rows = cur.fetchmany(n)
            while rows:
                yield rows
                rows = cur.fetchmany(n)
        finally:
            self.pool.checkin(s)


def copy_run(src_pool, dst_pool, run_id):
    src = src_pool.checkout()  # leak: not checked in when the destination has no free session
    dst = dst_pool.checkout_nowait()  # clean: checked in at the end
    if dst is None:
        return 0
    rows = src.all("select step, value from metrics where run=?", run_id)
    for step, value in rows:
        dst.run("insert into metrics values (?,?,?)", run_id, step, value)
    dst.commit()
    dst_pool.checkin(dst)
    src_pool.checkin(src)
    return len(rows)


def execute_retry(pool, sql, args, tries=3):
    s = pool.checkout()  # clean: near miss, break and else both reach the checkin
    for attempt in range(tries):
        try:
            n = s.run(sql, *args)
            s.commit()
            break
        except sqlite3.OperationalError:
            s.rollback()
            time.sleep(0.05 * (attempt + 1))
    else:
        n = -1
    pool.checkin(s)
    return n


def ping_all(pools):
    """Names of the pools that answer."""
    alive = []
    for name, pool in pools.items():
        s = pool.checkout_nowait()  # leak: a database without a schema version is skipped with the session out
        if s is None:
            continue
        if s.one("select v from schema_version") is None:
            continue
        alive.append(name)
        pool.checkin(s)
    return alive
