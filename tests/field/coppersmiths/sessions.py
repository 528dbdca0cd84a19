"""Metadata database sessions: engine -> tenant view -> unit of work, each layer hands out the layer below."""
import queue
import sqlite3
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional


class Engine:
    def __init__(self, path: str, size: int = 4):
        self._q: "queue.LifoQueue[sqlite3.Connection]" = queue.LifoQueue()
        for _ in range(size):
            self._q.put(sqlite3.connect(path, check_same_thread=False))

    def connect(self, timeout: float = 5.0) -> sqlite3.Connection:
        return self._q.get(timeout=timeout)

    def connect_nowait(self) -> Optional[sqlite3.Connection]:
        try:
            return self._q.get_nowait()
        except queue.Empty:
            return None

    def disconnect(self, c: sqlite3.Connection) -> None:
        self._q.put(c)

    def connect_checked(self) -> sqlite3.Connection:
        c = self._q.get()  # leak: failed check raises with the connection out of the queue
        if c.execute("pragma quick_check").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("corrupt")
        return c


class TenantView:
    """Wraps an engine; opens the tenant's schema on each connection it gives out."""

    def __init__(self, engine: Engine, tenant: str):
        self.engine = engine
        self.tenant = tenant

    def open(self) -> sqlite3.Connection:
        c = self.engine.connect()  # clean: returned, or disconnected when attach fails
        try:
            c.execute("attach database ? as t", (f"{self.tenant}.db",))
        except sqlite3.OperationalError:
            self.engine.disconnect(c)
            raise
        return c

    def close(self, c: sqlite3.Connection) -> None:
        c.execute("detach database t")
        self.engine.disconnect(c)

    def open_readonly(self) -> Optional[sqlite3.Connection]:
        c = self.engine.connect_nowait()  # leak: attach failure is swallowed and c is not disconnected
        if c is None:
            return None
        try:
            c.execute("attach database ? as t", (f"file:{self.tenant}.db?mode=ro",))
        except sqlite3.OperationalError:
            return None
        return c


class UnitOfWork:
    def __init__(self, view: TenantView):
        self.view = view
        self.conn: Optional[sqlite3.Connection] = None
        self.readonly = False

    def __enter__(self) -> "UnitOfWork":
        self.conn = self.view.open()  # clean: __exit__ closes on both outcomes
        return self

    def __exit__(self, et, ev, tb) -> bool:
        try:
            if et is None:
                self.conn.commit()
            else:
                self.conn.rollback()
        finally:
            self.view.close(self.conn)
            self.conn = None
        return False


class ReportUnit(UnitOfWork):
    def __init__(self, view: TenantView, readonly: bool = True):
        super().__init__(view)
        self.readonly = readonly

    def __enter__(self) -> "ReportUnit":
        self.conn = self.view.open()  # leak: __exit__ returns early for readonly units
        self.conn.execute("begin")
        return self

    def __exit__(self, et, ev, tb) -> bool:
        if self.readonly:
            self.conn.rollback()
            return False
        return super().__exit__(et, ev, tb)


class LazyUnit:
    """Opens on first use; finish() must be called."""

    def __init__(self, view: TenantView, borrowed: Optional[sqlite3.Connection] = None):
        self.view = view
        self.owns = borrowed is None
        self.conn = borrowed

    def connection(self) -> sqlite3.Connection:
        if self.conn is None:
            self.conn = self.view.open()  # clean: near miss, owns is true whenever it was opened here
        return self.conn

    def finish(self) -> None:
        if self.owns and self.conn is not None:
            self.view.close(self.conn)
        self.conn = None


class MetaStore:
    def __init__(self, view: TenantView):
        self.view = view
        self._local = threading.local()
        self._cursors: Dict[int, sqlite3.Connection] = {}
        self._next = 0

    def lookup(self, key: str) -> Optional[str]:
        c = self.view.open()  # leak: no row returns None without close
        row = c.execute("select v from t.kv where k=?", (key,)).fetchone()
        if row is None:
            return None
        self.view.close(c)
        return row[0]

    def exists(self, key: str) -> bool:
        c = self.view.open()  # clean: row is only inspected after close
        row = c.execute("select 1 from t.kv where k=?", (key,)).fetchone()
        self.view.close(c)
        if row is None:
            return False
        return True

    def write(self, rows: Dict[str, str]) -> None:
        with UnitOfWork(self.view) as u:  # clean: with statement
            u.conn.executemany("insert into t.kv values (?, ?)", list(rows.items()))

    def write_lazy(self, rows: Dict[str, str], borrowed: Optional[sqlite3.Connection] = None) -> None:
        unit = LazyUnit(self.view, borrowed)
        try:
            if rows:
                unit.connection().executemany("insert into t.kv values (?, ?)", list(rows.items()))  # clean: near miss, finish() in finally closes it
        finally:
            unit.finish()

    @contextmanager
    def txn(self, conn: Optional[sqlite3.Connection] = None) -> Iterator[sqlite3.Connection]:
        own = conn is None
        c = self.view.open() if own else conn  # clean: near miss, closed under the same flag
        try:
            yield c
            c.commit()
        finally:
            if own:
                self.view.close(c)

    def open_cursor(self) -> int:
        self._next += 1
        self._cursors[self._next] = self.view.open()  # clean: kept in the table until close_cursor()
        return self._next

    def fetch(self, cid: int, sql: str) -> List[Any]:
        return self._cursors[cid].execute(sql).fetchall()

    def close_cursor(self, cid: int) -> None:
        c = self._cursors.pop(cid, None)  # clean: closed
        if c is not None:
            self.view.close(c)

    def drain_cursor(self, cid: int, sink: Callable[[Any], bool]) -> int:
        c = self._cursors.pop(cid)  # leak: sink that refuses a row ends the drain before close
        n = 0
        for row in c.execute("select * from t.kv"):
            if not sink(row):
                return n
            n += 1
        self.view.close(c)
        return n

    def counts(self, others: Iterable["MetaStore"]) -> List[int]:
        out = []
        for m in others:
            ro = m.view.open_readonly()  # clean: near miss, continue only when nothing was opened
            if ro is None:
                out.append(-1)
                continue
            out.append(ro.execute("select count(*) from t.kv").fetchone()[0])
            m.view.close(ro)
        return out
