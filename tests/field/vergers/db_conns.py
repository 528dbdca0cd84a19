"""A fixed set of database connections, last in first out, and the stores on top of it."""
import queue
import threading
import time


class DatabaseError(Exception):
    pass


class SchemaMismatch(Exception):
    pass


class ConnectionPool:
    def __init__(self, dsn, connect, size=8):
        self._idle = queue.LifoQueue(size)
        for _ in range(size):
            self._idle.put(connect(dsn))

    def checkout(self, timeout=5.0):
        return self._idle.get(timeout=timeout)

    def checkin(self, conn):
        conn.rollback()
        self._idle.put(conn)


def latest_run(pool, experiment):
    conn = pool.checkout()  # leak: an experiment without runs returns before the checkin
    rows = conn.execute("select id, loss from runs where experiment = ? order by id", [experiment])
    if not rows:
        return None
    run_id, loss = rows[-1]
    pool.checkin(conn)
    return run_id, loss


def save_metrics(pool, log, run_id, metrics):
    conn = pool.checkout()  # leak: the handler logs a database error and gives False back, not the connection
    try:
        conn.executemany("insert into metrics values (?, ?, ?)", [(run_id, k, v) for k, v in metrics.items()])
        conn.commit()
    except DatabaseError as err:
        log.warning("metrics of run %s not saved: %s", run_id, err)
        return False
    pool.checkin(conn)
    return True


def load_features(pool, table, expected):
    conn = pool.checkout()  # leak: SchemaMismatch raised in the try is no DatabaseError and passes both checkins
    try:
        columns = conn.columns(table)
        if columns != expected:
            raise SchemaMismatch(table)
        rows = conn.execute(f"select * from {table}")
    except DatabaseError:
        pool.checkin(conn)
        raise
    pool.checkin(conn)
    return rows


def insert_with_retry(pool, sql, params, attempts=3):
    conn = None
    try:
        for attempt in range(attempts):
            conn = pool.checkout()  # leak: the next attempt binds conn anew, and the finally sees the last one only
            try:
                conn.execute(sql, params)
                conn.commit()
                return attempt
            except DatabaseError:
                time.sleep(2 ** attempt)
        return None
    finally:
        if conn is not None:
            pool.checkin(conn)


def update_with_retry(pool, sql, params, attempts=3):
    failure = None
    for attempt in range(attempts):
        conn = pool.checkout()  # clean: the finally belongs to the single attempt and runs before the next and before the return
        try:
            conn.execute(sql, params)
            conn.commit()
            return attempt
        except DatabaseError as err:
            failure = err
        finally:
            pool.checkin(conn)
        time.sleep(2 ** attempt)
    raise failure


class TenantStore:
    def __init__(self, pool):
        self.pool = pool
        self.local = threading.local()

    def conn(self):
        if not hasattr(self.local, "conn"):
            self.local.conn = self.pool.checkout()  # leak: the local value of each import thread dies with the thread, nothing checks it in
        return self.local.conn

    def import_files(self, paths):
        threads = [threading.Thread(target=self._import, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _import(self, path):
        with open(path) as lines:
            self.conn().executemany("insert into docs values (?)", [(line,) for line in lines])
        self.conn().commit()


class Transaction:
    def __init__(self, pool):
        self.pool = pool
        self.conn = pool.checkout()  # leak: commit() checks the connection in, rollback() only drops it

    def execute(self, sql, *params):
        return self.conn.execute(sql, params)

    def commit(self):
        conn, self.conn = self.conn, None
        try:
            conn.commit()
        finally:
            self.pool.checkin(conn)

    def rollback(self):
        conn, self.conn = self.conn, None
        conn.rollback()


def iter_documents(pool, dataset):
    conn = pool.checkout()  # leak: sample_documents() leaves the loop early and what stands after the yield never runs
    cursor = conn.cursor("select body from documents where dataset = ?", [dataset])
    for (body,) in cursor:
        yield body
    pool.checkin(conn)


def sample_documents(pool, dataset, max_chars):
    out, size = [], 0
    for body in iter_documents(pool, dataset):
        out.append(body)
        size += len(body)
        if size >= max_chars:
            break
    return out


def iter_labels(pool, dataset):
    conn = pool.checkout()  # clean: first_label() closes the generator and that runs the finally at the yield
    try:
        for (label,) in conn.cursor("select label from labels where dataset = ?", [dataset]):
            yield label
    finally:
        pool.checkin(conn)


def first_label(pool, dataset, wanted):
    labels = iter_labels(pool, dataset)
    try:
        for position, label in enumerate(labels):
            if label in wanted:
                return position, label
        return None
    finally:
        labels.close()


class Heartbeat:
    def __init__(self, pool, worker_id):
        self.pool = pool
        self.worker_id = worker_id
        self.conn = None

    def beat(self):
        if self.conn is None:
            self.conn = self.pool.checkout()  # leak: the handler sets the attribute to None and the next beat takes another connection
        try:
            self.conn.execute("update workers set seen = now() where id = ?", [self.worker_id])
            self.conn.commit()
        except DatabaseError:
            self.conn = None
            return False
        return True

    def stop(self):
        if self.conn is not None:
            self.pool.checkin(self.conn)
            self.conn = None


def _claim_job(conn, worker_id):
    row = conn.execute("select id, state from jobs where state = 'new' limit 1")
    if not row:
        raise LookupError("no job")
    conn.execute("update jobs set owner = ? where id = ?", [worker_id, row[0][0]])
    conn.commit()
    return row[0][0]


def claim_job(pool, worker_id):
    conn = pool.checkout()  # clean: the LookupError of the helper passes the finally here
    try:
        return _claim_job(conn, worker_id)
    finally:
        pool.checkin(conn)


def ping(pool, log):
    try:
        conn = pool.checkout(timeout=0.1)  # clean: queue.Empty means that there is no connection to give back
    except queue.Empty:
        log.warning("pool exhausted")
        return False
    try:
        conn.execute("select 1")
    except DatabaseError:
        return False
    finally:
        pool.checkin(conn)
    return True
