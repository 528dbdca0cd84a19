"""Metadata database connections for the experiment tracker."""
import sqlite3
import threading
from contextlib import closing, contextmanager
from queue import Empty, Queue
from typing import Any, Iterator, List, Mapping, Optional, Sequence


class PoolExhausted(Exception):
    """No connection within the timeout."""


class ConnectionPool:
    def __init__(self, dsn: str, size: int = 5, timeout: float = 2.0) -> None:
        self.dsn = dsn
        self.timeout = timeout
        self._q: "Queue[sqlite3.Connection]" = Queue()
        for _ in range(size):
            self._q.put(sqlite3.connect(dsn, check_same_thread=False))

    def getconn(self) -> sqlite3.Connection:
        try:
            conn = self._q.get(timeout=self.timeout)  # leak: a connection with changes in flight is refused and lost
        except Empty:
            raise PoolExhausted(self.dsn) from None
        if conn.in_transaction:
            raise PoolExhausted("dirty connection")
        return conn

    def putconn(self, conn: sqlite3.Connection) -> None:
        self._q.put(conn)

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        conn = self.getconn()  # clean: finally puts it back
        try:
            yield conn
            conn.commit()
        finally:
            self.putconn(conn)

    def drain(self) -> None:
        while not self._q.empty():
            self._q.get().close()  # clean: closed on the spot


class Tracker:
    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self._tx: Optional[sqlite3.Connection] = None
        self._mutex = threading.RLock()

    def log_metric(self, run: int, key: str, value: float) -> None:
        with self.pool.connection() as conn:  # clean: own context manager
            conn.execute("insert into metric values (?, ?, ?)", (run, key, value))

    def log_many(self, run: int, metrics: Mapping[str, float]) -> int:
        conn = self.pool.getconn()  # leak: an empty mapping returns 0 at once
        if not metrics:
            return 0
        conn.executemany("insert into metric values (?, ?, ?)", [(run, k, v) for k, v in metrics.items()])
        conn.commit()
        self.pool.putconn(conn)
        return len(metrics)

    def best(self, key: str) -> Optional[float]:
        conn = self.pool.getconn()  # clean: near miss, the return in try still runs the finally
        try:
            with closing(conn.cursor()) as cur:  # clean: closing()
                cur.execute("select max(value) from metric where key = ?", (key,))
                row = cur.fetchone()
                return row[0] if row else None
        finally:
            self.pool.putconn(conn)

    def runs(self) -> List[int]:
        conn = self.pool.getconn()  # leak: the handler for a missing table returns [] and keeps it
        try:
            rows = conn.execute("select id from run").fetchall()
        except sqlite3.OperationalError:
            return []
        self.pool.putconn(conn)
        return [r[0] for r in rows]

    def runs_or_empty(self) -> List[int]:
        conn = self.pool.getconn()  # clean: near miss, the handler only sets rows and falls through to putconn
        try:
            rows = conn.execute("select id from run").fetchall()
        except sqlite3.OperationalError:
            rows = []
        self.pool.putconn(conn)
        return [r[0] for r in rows]

    def begin(self) -> None:
        if self._tx is not None:
            raise RuntimeError("nested transaction")
        self._tx = self.pool.getconn()  # leak: rollback() sets the field to None without putconn
        self._tx.execute("begin")

    def commit(self) -> None:
        tx, self._tx = self._tx, None
        if tx is not None:
            tx.commit()
            self.pool.putconn(tx)

    def rollback(self) -> None:
        if self._tx is not None:
            self._tx.rollback()
            self._tx = None

    def copy_run(self, src: int, other: ConnectionPool) -> int:
        a = self.pool.getconn()  # clean: put back at both exits
        b = other.getconn()  # leak: put back only when something was copied
        rows = a.execute("select key, value from metric where run = ?", (src,)).fetchall()
        self.pool.putconn(a)
        if not rows:
            return 0
        b.executemany("insert into metric values (?, ?, ?)", [(src, k, v) for k, v in rows])
        b.commit()
        other.putconn(b)
        return len(rows)

    def guarded(self, sql: str, args: Sequence[Any] = ()) -> int:
        with self._mutex:  # clean: with statement
            conn = self.pool.getconn()  # clean: put back right after
            n = conn.execute(sql, args).rowcount
            self.pool.putconn(conn)
        return n

    def vacuum(self, force: bool) -> bool:
        if not self._mutex.acquire(blocking=force):  # clean: near miss, a failed acquire holds nothing
            return False
        try:
            with self.pool.connection() as conn:  # clean: own context manager
                conn.execute("vacuum")
        finally:
            self._mutex.release()
        return True

    def touch(self, run: int) -> bool:
        self._mutex.acquire()  # leak: an unknown run returns with the lock held
        known = run in self.runs_or_empty()
        if not known:
            return False
        self._mutex.release()
        return True
