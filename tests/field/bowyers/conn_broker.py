"""Connection broker between the training control plane and its metadata database."""
from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import Iterator, Optional

log = logging.getLogger(__name__)


class Conn:
    """One wire connection; the protocol work happens in the driver below it."""

    def __init__(self, dsn: str, ident: int) -> None:
        self.dsn = dsn
        self.ident = ident
        self.generation = 0
        self.in_tx = False

    def execute(self, sql: str, *args) -> list[tuple]:
        log.debug("conn %d: %s %r", self.ident, sql, args)
        return []

    def ping(self) -> bool:
        return bool(self.execute("select 1"))

    def reset(self) -> None:
        self.in_tx = False
        self.generation += 1


class Broker:
    def __init__(self, dsn: str, size: int) -> None:
        self.dsn = dsn
        self._idle: deque[Conn] = deque(Conn(dsn, i) for i in range(size))
        self._lent: dict[int, float] = {}
        self._cond = threading.Condition()
        self._next_ident = size

    def checkout(self, timeout: Optional[float] = None) -> Optional[Conn]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._idle), timeout):
                return None
            conn = self._idle.popleft()
            self._lent[conn.ident] = time.monotonic()
            return conn

    def checkin(self, conn: Conn) -> None:
        with self._cond:
            self._lent.pop(conn.ident)
            conn.reset()
            self._idle.append(conn)
            self._cond.notify()

    def discard(self, conn: Conn) -> None:
        """Throw a dead connection away and put a fresh one in its place."""
        with self._cond:
            self._lent.pop(conn.ident)
            self._idle.append(Conn(self.dsn, self._next_ident))
            self._next_ident += 1
            self._cond.notify()

    @contextlib.contextmanager
    def session(self) -> Iterator[Conn]:
        conn = self.checkout()  # clean: given back in the finally
        try:
            yield conn
        finally:
            self.checkin(conn)

    def stats(self) -> dict[str, float]:
        with self._cond:
            now = time.monotonic()
            oldest = max((now - t for t in self._lent.values()), default=0.0)
            return {"idle": len(self._idle), "lent": len(self._lent), "oldest_s": oldest}


class WriteTx:
    """Transaction scope for the run tables; commits unless the block failed."""

    def __init__(self, broker: Broker, isolation: str = "serializable") -> None:
        self._broker = broker
        self._isolation = isolation
        self._statements = 0
        self.conn: Optional[Conn] = None

    def __enter__(self) -> "WriteTx":
        self.conn = self._broker.checkout()  # leak: __exit__ without statements skips the checkin
        self.conn.execute("begin isolation level " + self._isolation)
        self.conn.in_tx = True
        return self

    def run(self, sql: str, *args) -> list[tuple]:
        self._statements += 1
        return self.conn.execute(sql, *args)

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self._statements == 0:
            self.conn.execute("rollback")
            return False
        self.conn.execute("rollback" if exc_type else "commit")
        self._broker.checkin(self.conn)
        self.conn = None
        return False


class Snapshot:
    """Repeatable-read view that the report writer keeps open over several queries."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._conn: Optional[Conn] = broker.checkout()  # clean: near miss, close() gives it back
        self._conn.execute("begin isolation level repeatable read")

    def query(self, sql: str, *args) -> list[tuple]:
        return self._conn.execute(sql, *args)

    def close(self) -> None:
        if self._conn is None:
            return
        self._conn.execute("rollback")
        self._broker.checkin(self._conn)
        self._conn = None


def run_by_name(broker: Broker, name: str) -> Optional[tuple]:
    with broker.session() as conn:  # clean: context manager gives it back
        rows = conn.execute("select id, state from runs where name = ?", name)
        if not rows:
            return None
        return rows[0]


def list_runs(broker: Broker, owner: str, limit: int = 100) -> list[dict]:
    conn = broker.checkout()  # leak: the early return for an owner without runs skips the checkin
    rows = conn.execute("select id, name, state from runs where owner = ? limit ?", owner, limit)
    if not rows:
        return []
    found = [{"id": r[0], "name": r[1], "state": r[2]} for r in rows]
    broker.checkin(conn)
    return found


def healthy_conn(broker: Broker, attempts: int = 3) -> Optional[Conn]:
    for attempt in range(attempts):
        conn = broker.checkout(timeout=0.5)  # clean: near miss, returned when it answers, discarded when not
        if conn is None:
            log.info("no connection on attempt %d", attempt)
            continue
        if conn.ping():
            return conn
        broker.discard(conn)
    return None


def upsert_metric(broker: Broker, run_id: int, key: str, value: float) -> bool:
    conn = healthy_conn(broker)  # clean: given back in the finally
    if conn is None:
        return False
    try:
        conn.execute("insert into metrics values (?, ?, ?) on conflict replace", run_id, key, value)
    finally:
        broker.checkin(conn)
    return True


def count_by_owner(broker: Broker) -> dict[str, int]:
    counts: dict[str, int] = {}
    conn = healthy_conn(broker)  # leak: the return on a row without owner leaves the connection lent
    if conn is None:
        return counts
    for owner, n in conn.execute("select owner, count(*) from runs group by owner order by owner"):
        if owner is None:
            log.warning("%d runs have no owner, the report stops here", n)
            return counts
        counts[owner] = n
    broker.checkin(conn)
    return counts


def copy_run(primary: Broker, archive: Broker, run_id: int) -> bool:
    src = primary.checkout()  # leak: not given back when the archive has no connection
    dst = archive.checkout(timeout=2.0)  # clean: given back at the end, nothing held when None
    if dst is None:
        log.error("archive is busy, run %d stays", run_id)
        return False
    for row in src.execute("select * from steps where run = ?", run_id):
        dst.execute("insert into steps values (?)", row)
    archive.checkin(dst)
    primary.checkin(src)
    return True


def move_run(primary: Broker, archive: Broker, run_id: int) -> bool:
    src = primary.checkout()  # clean: given back on both ways
    dst = archive.checkout(timeout=2.0)  # clean: given back at the end, nothing held when None
    if dst is None:
        primary.checkin(src)
        return False
    rows = src.execute("delete from steps where run = ? returning *", run_id)
    for row in rows:
        dst.execute("insert into steps values (?)", row)
    archive.checkin(dst)
    primary.checkin(src)
    return bool(rows)


def sync_tags(broker: Broker, run_id: int, tags: dict[str, str], persist: bool) -> int:
    conn = None
    if persist:
        conn = broker.checkout()  # clean: near miss, both guards test the same unchanged flag
    changed = 0
    for key, value in sorted(tags.items()):
        clean_key = key.strip().lower()
        if persist:
            conn.execute("update tags set v = ? where run = ? and k = ?", value, run_id, clean_key)
        changed += 1
    if persist:
        broker.checkin(conn)
    return changed


def audit(broker: Broker, event: str, level: str) -> str:
    conn = None
    if level != "off":
        conn = broker.checkout()  # leak: given back for "full" only, not for the other levels
        conn.execute("insert into audit(event) values (?)", event)
    line = f"{time.time():.3f} {event}"
    if level == "full":
        conn.execute("insert into audit_lines values (?)", line)
        broker.checkin(conn)
    return line


def nightly_report(broker: Broker, owners: list[str]) -> dict[str, int]:
    snap = Snapshot(broker)  # clean: closed in the finally
    try:
        return {o: len(snap.query("select id from runs where owner = ?", o)) for o in owners}
    finally:
        snap.close()


def weekly_report(broker: Broker, owners: list[str]) -> list[str]:
    lines = []
    for owner in owners:
        snap = Snapshot(broker)  # leak: continue for a silent owner skips close()
        rows = snap.query("select id, gpu_hours from runs where owner = ?", owner)
        if not rows:
            lines.append(f"{owner}: no runs")
            continue
        lines.append(f"{owner}: {len(rows)} runs, {sum(r[1] for r in rows):.1f} GPU hours")
        snap.close()
    return lines
