"""Online feature service: reads rows from sharded key-value stores through a connection pool per shard."""
from __future__ import annotations

import hashlib
import json
import logging
import socket
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Iterator, Sequence

logger = logging.getLogger("features.online")


class StoreDown(Exception):
    """The shard refuses connections or hung up."""


class PoolTimeout(Exception):
    """All connections of a shard were busy for too long."""


@dataclass(frozen=True)
class ShardAddress:
    host: str
    port: int


@dataclass
class FeatureView:
    name: str
    columns: tuple[str, ...]
    defaults: dict[str, float] = field(default_factory=dict)


class Connection:
    def __init__(self, address: ShardAddress, sock: socket.socket):
        self.address = address
        self.opened = time.monotonic()
        self.broken = False
        self._sock = sock
        self._file = sock.makefile("rwb")

    def ask(self, **command: Any) -> Any:
        self._file.write(json.dumps(command).encode() + b"\n")
        self._file.flush()
        line = self._file.readline()
        if not line:
            self.broken = True
            raise StoreDown(f"{self.address.host} hung up")
        return json.loads(line)

    def stale(self, max_age: float = 900.0) -> bool:
        return time.monotonic() - self.opened > max_age

    def close(self) -> None:
        self._file.close()
        self._sock.close()


class ShardPool:
    def __init__(self, address: ShardAddress, size: int = 8):
        self.address = address
        self.size = size
        self._permits = threading.Semaphore(size)
        self._mutex = threading.Lock()
        self._idle: list[Connection] = []

    def _dial(self) -> Connection:
        try:
            sock = socket.create_connection((self.address.host, self.address.port), timeout=2.0)  # clean: owned by the connection that is returned
        except OSError as exc:
            raise StoreDown(f"{self.address.host}: {exc}") from exc
        return Connection(self.address, sock)

    def borrow(self, wait: float = 2.0) -> Connection:
        if not self._permits.acquire(timeout=wait):  # leak: StoreDown from _dial goes up and the permit stays taken
            raise PoolTimeout(f"{self.address.host}: {self.size} connections busy")
        with self._mutex:
            conn = self._idle.pop() if self._idle else None  # clean: near miss, a stale one is closed before it is replaced, the others are returned
        if conn is not None and conn.stale():
            conn.close()
            conn = None
        return conn if conn is not None else self._dial()  # clean: returned to the caller

    def give_back(self, conn: Connection) -> None:
        if conn.broken:
            conn.close()
        else:
            with self._mutex:
                self._idle.append(conn)
        self._permits.release()

    def warm(self, count: int) -> None:
        """Dial a few connections before traffic arrives."""
        conns = [self.borrow(wait=0.5) for _ in range(min(count, self.size))]  # leak: PoolTimeout or StoreDown part way drops those borrowed before
        logger.info("%s: %d connections warm", self.address.host, len(conns))
        for conn in conns:
            self.give_back(conn)


class Snapshot:
    """Pins a connection for reads that have to be consistent with each other."""

    def __init__(self, pool: ShardPool):
        self._pool = pool

    def __enter__(self) -> Connection:
        self._conn = self._pool.borrow()  # clean: given back here when BEGIN fails, by __exit__ else
        try:
            self._conn.ask(op="begin")
        except StoreDown:
            self._pool.give_back(self._conn)
            raise
        return self._conn

    def __exit__(self, *exc_info) -> None:
        self._pool.give_back(self._conn)


class ScanCursor:
    """Server-side cursor over a whole view, page by page."""

    def __init__(self, pool: ShardPool, view: FeatureView, page: int = 500):
        self._pool = pool
        self._conn: Connection | None = pool.borrow(wait=10.0)  # leak: close() before the last page closes the cursor but keeps the connection
        self._view, self._page = view, page
        self._token: str | None = None
        self.rows = 0

    def next_page(self) -> list[dict]:
        if self._conn is None:
            return []
        answer = self._conn.ask(op="scan", view=self._view.name, limit=self._page, token=self._token)
        self._token = answer.get("token")
        self.rows += len(answer["rows"])
        if self._token is None:
            self._pool.give_back(self._conn)
            self._conn = None
        return answer["rows"]

    def close(self) -> None:
        if self._conn is not None and self._token is not None:
            self._conn.ask(op="close_scan", token=self._token)
        self._conn = None
        logger.debug("scan of %s closed after %d rows", self._view.name, self.rows)


class FeatureReader:
    def __init__(self, pools: Sequence[ShardPool]):
        self._pools = list(pools)
        self._sessions: dict[str, tuple[ShardPool, Connection, float]] = {}
        self._misses: dict[str, int] = defaultdict(int)

    def _pool_of(self, entity: str) -> ShardPool:
        digest = hashlib.blake2b(entity.encode(), digest_size=4).digest()
        return self._pools[int.from_bytes(digest, "big") % len(self._pools)]

    def get_row(self, view: FeatureView, entity: str) -> dict[str, float]:
        pool = self._pool_of(entity)
        conn = pool.borrow()  # leak: the default row for a miss is returned before give_back
        row = conn.ask(op="get", view=view.name, key=entity)
        if row is None:
            self._misses[view.name] += 1
            return dict(view.defaults)
        pool.give_back(conn)
        return {name: float(row.get(name, view.defaults.get(name, 0.0))) for name in view.columns}

    def get_rows(self, view: FeatureView, entities: Sequence[str]) -> list[dict | None]:
        conns: dict[ShardPool, Connection] = {}
        rows: list[dict | None] = []
        try:
            for entity in entities:
                pool = self._pool_of(entity)
                if pool not in conns:
                    conns[pool] = pool.borrow()  # clean: near miss, one per shard in the table, all given back by the finally
                rows.append(conns[pool].ask(op="get", view=view.name, key=entity))
        finally:
            for pool, conn in conns.items():
                pool.give_back(conn)
        return rows

    def copy_row(self, view: FeatureView, source: str, target: str) -> None:
        src_pool, dst_pool = self._pool_of(source), self._pool_of(target)
        src = src_pool.borrow()  # leak: the second borrow may raise PoolTimeout or StoreDown while this one is held
        dst = dst_pool.borrow()  # clean: given back in the finally
        try:
            dst.ask(op="put", view=view.name, key=target, row=src.ask(op="get", view=view.name, key=source))
        finally:
            src_pool.give_back(src)
            dst_pool.give_back(dst)

    def pair(self, view: FeatureView, left: str, right: str) -> Iterator[dict]:
        pool = self._pool_of(left)
        with Snapshot(pool) as conn:  # clean: context manager
            yield conn.ask(op="get", view=view.name, key=left)
            yield conn.ask(op="get", view=view.name, key=right)

    def open_session(self, user: str) -> None:
        """Sticky connection for notebooks."""
        if user in self._sessions:
            return
        pool = self._pool_of(user)
        self._sessions[user] = (pool, pool.borrow(), time.monotonic())  # leak: expire_sessions() deletes entries without give_back

    def end_session(self, user: str) -> None:
        pool, conn, _ = self._sessions.pop(user)
        pool.give_back(conn)

    def expire_sessions(self, max_idle: float = 3600.0) -> int:
        horizon = time.monotonic() - max_idle
        old = [user for user, (_, _, since) in self._sessions.items() if since < horizon]
        for user in old:
            logger.info("session of %s expired", user)
            del self._sessions[user]
        return len(old)


class DefaultsRefresher(threading.Thread):
    def __init__(self, pool: ShardPool, views: list[FeatureView]):
        super().__init__(name="defaults-refresh", daemon=True)
        self._pool, self._views = pool, views
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(60.0):
            try:
                conn = self._pool.borrow()  # clean: near miss, the continue below passes through the finally
            except (PoolTimeout, StoreDown):
                continue
            try:
                for view in self._views:
                    view.defaults.update(conn.ask(op="defaults", view=view.name))
            except StoreDown as exc:
                logger.warning("refresh skipped: %s", exc)
                continue
            finally:
                self._pool.give_back(conn)
