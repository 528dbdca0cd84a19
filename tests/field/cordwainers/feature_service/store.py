"""Feature reads and writes."""
from __future__ import annotations

import logging
import threading

from .db import DbPool, DbSession

log = logging.getLogger("features.store")


class FeatureStore:
    def __init__(self, pool: DbPool) -> None:
        self.pool = pool
        self._local: dict[int, DbSession] = {}

    def get(self, entity: str) -> dict[str, float]:
        with self.pool.session() as s:  # clean: context manager
            return {k: float(v) for k, v in s.query("SELECT k, v FROM f WHERE e=?", entity)}

    def get_version(self, entity: str) -> int:
        s = self.pool.getconn()  # leak: an entity without rows returns 0 with the session
        if s is None:
            return -1
        rows = s.query("SELECT max(ver) FROM f WHERE e=?", entity)
        if not rows or rows[0][0] is None:
            return 0
        self.pool.putconn(s)
        return int(rows[0][0])

    def put_many(self, entity: str, values: dict[str, float]) -> int:
        with self.pool.transaction() as s:  # clean: context manager
            for k, v in values.items():
                s.query("INSERT INTO f(e, k, v) VALUES (?, ?, ?)", entity, k, v)
        return len(values)

    def count_groups(self, prefixes: list[str]) -> dict[str, int]:
        out: dict[str, int] = {}
        s = None
        for p in prefixes:
            s = self.pool.getconn()  # leak: one session per prefix, the last one only is put back
            if s is None:
                break
            out[p] = s.query("SELECT count(*) FROM f WHERE e LIKE ?", p + "%")[0][0]
        self.pool.putconn(s)
        return out

    # -- sessions bound to a thread --------------------------------------------------------
    def bind(self) -> DbSession | None:
        me = threading.get_ident()
        if me not in self._local:
            s = self.pool.getconn()  # clean: near miss, kept per thread until unbind
            if s is None:
                return None
            self._local[me] = s
        return self._local[me]

    def unbind(self) -> None:
        self.pool.putconn(self._local.pop(threading.get_ident(), None))

    def sum_bound(self, entities: list[str]) -> float:
        s = self.bind()  # clean: unbind puts it back
        if s is None:
            return 0.0
        total = 0.0
        for e in entities:
            for (v,) in s.query("SELECT v FROM f WHERE e=?", e):
                total += float(v)
        self.unbind()
        return total

    def compare(self, entity: str, replica: DbPool) -> bool | None:
        a = self.pool.getconn()  # clean: put back on both ways
        b = replica.getconn()  # leak: put back only when both sessions are there and the rows agree
        if a is None or b is None:
            self.pool.putconn(a)
            return None
        sql = "SELECT k, v FROM f WHERE e=? ORDER BY k"
        same = a.query(sql, entity) == b.query(sql, entity)
        self.pool.putconn(a)
        if not same:
            log.warning("replica differs for %s", entity)
            return False
        replica.putconn(b)
        return True
