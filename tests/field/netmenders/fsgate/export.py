from __future__ import annotations

import csv
import logging
from typing import Any, Iterable, Optional

from . import conns
from .loader import BatchLoader
from .session import open_session

log = logging.getLogger(__name__)


class Exporter:
    def __init__(self, loader: BatchLoader):
        self.loader = loader

    def to_csv(self, path: str, names: list[str], n: int) -> None:
        self.loader.load(names, n)  # clean: unloaded in finally
        try:
            with open(path, "w", newline="") as f:
                w = csv.writer(f)
                w.writerow(names)
                w.writerows(zip(*(self.loader.columns[k].tolist() for k in names)))
        finally:
            self.loader.unload()

    def copy_rows(self, rows: Iterable[tuple[Any, ...]], dest: str, conn: Optional[Any] = None) -> int:
        n = 0
        with open_session(conn) as s:  # clean: closed by with, a lent connection stays with the caller
            s.begin()
            for r in rows:
                if any(v is None for v in r):
                    continue
                s.query(f"insert into {dest} values {r!r}")
                n += 1
            s.query("commit")
            s.in_tx = False
        return n

    def probe(self, tables: list[str]) -> dict[str, bool]:
        seen: dict[str, bool] = {}
        for t in tables:
            conn = conns.checkout_conn()  # leak: a table that does not exist goes on to the next one without return_conn
            try:
                conn.execute(f"select 1 from {t} limit 1")
            except LookupError:
                seen[t] = False
                continue
            seen[t] = True
            conns.return_conn(conn)
        return seen
