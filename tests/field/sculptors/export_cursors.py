"""Warehouse exports. A declared cursor counts as long as its id stands in `live`."""
from __future__ import annotations

import csv
import io
import logging
from dataclasses import dataclass

log = logging.getLogger("export")


@dataclass
class Cursor:
    sql: str
    position: int = 0
    exhausted: bool = False


class CursorTable:
    """At most `limit` live cursors. Whoever declared one deletes its id from `live`."""

    def __init__(self, engine, limit: int) -> None:
        self.engine = engine
        self.limit = limit
        self.live: dict[int, Cursor] = {}
        self._last = 0

    def declare(self, sql: str) -> int:
        """The id of a new cursor, 0 when there are too many."""
        if len(self.live) >= self.limit:
            return 0
        self._last += 1
        self.live[self._last] = Cursor(sql)
        return self._last

    def pull(self, cursor_id: int, count: int) -> list[tuple]:
        cursor = self.live[cursor_id]
        rows = self.engine.page(cursor.sql, cursor.position, count)
        cursor.position += len(rows)
        cursor.exhausted = len(rows) < count
        return rows


class Exporter:
    def __init__(self, cursors: CursorTable, page: int = 1000) -> None:
        self.cursors = cursors
        self.page = page
        self.open_ids: list[int] = []

    def to_csv(self, sql: str) -> str:
        cursor_id = self.cursors.declare(sql)  # clean: deleted from live after the last page
        if not cursor_id:
            return ""
        out = io.StringIO()
        writer = csv.writer(out)
        while not self.cursors.live[cursor_id].exhausted:
            writer.writerows(self.cursors.pull(cursor_id, self.page))
        del self.cursors.live[cursor_id]
        return out.getvalue()

    def head(self, sql: str, count: int) -> list[tuple]:
        cursor_id = self.cursors.declare(sql)  # leak: an empty result returns with the id still live
        if cursor_id == 0:
            return []
        rows = self.cursors.pull(cursor_id, count)
        if not rows:
            log.info("no rows: %s", sql)
            return []
        del self.cursors.live[cursor_id]
        return rows

    def sample(self, sql: str, count: int, every: int) -> list[tuple]:
        cursor_id = self.cursors.declare(sql)  # clean: near miss, the break leads to the pop
        if cursor_id == 0:
            return []
        kept: list[tuple] = []
        while len(kept) < count:
            rows = self.cursors.pull(cursor_id, every)
            if not rows:
                break
            kept.append(rows[0])
        self.cursors.live.pop(cursor_id)
        return kept

    def has_rows(self, sql: str) -> bool:
        rows = self.cursors.pull(self.cursors.declare(sql), 1)  # leak: the id lives in the call only
        return bool(rows)

    def merge(self, queries: list[str]) -> list[tuple]:
        ids = []
        for sql in queries:
            cursor_id = self.cursors.declare(sql)  # clean: near miss, all of ids are popped
            if cursor_id:
                ids.append(cursor_id)
        rows = [row for i in ids for row in self.cursors.pull(i, self.page)]
        for i in ids:
            self.cursors.live.pop(i, None)
        return sorted(rows)

    def union(self, queries: list[str]) -> set[tuple]:
        seen: set[tuple] = set()
        for sql in queries:
            cursor_id = self.cursors.declare(sql)  # leak: only an exhausted cursor is deleted
            if not cursor_id:
                break
            seen.update(self.cursors.pull(cursor_id, self.page))
            if self.cursors.live[cursor_id].exhausted:
                del self.cursors.live[cursor_id]
        return seen

    def open_export(self, sql: str) -> int:
        cursor_id = self.cursors.declare(sql)  # clean: near miss, kept in open_ids, deleted by close
        if cursor_id:
            self.open_ids.append(cursor_id)
        return cursor_id

    def next_page(self, cursor_id: int) -> list[tuple]:
        if cursor_id not in self.open_ids:
            return []
        return self.cursors.pull(cursor_id, self.page)

    def close(self) -> None:
        for cursor_id in self.open_ids:
            del self.cursors.live[cursor_id]
        self.open_ids = []

    def count(self, sql: str) -> int:
        cursor_id = self.cursors.declare(f"select count(*) from ({sql}) q")  # clean: deleted in finally
        if not cursor_id:
            return -1
        try:
            return self.cursors.pull(cursor_id, 1)[0][0]
        finally:
            del self.cursors.live[cursor_id]


def diff(cursors: CursorTable, left: str, right: str, page: int) -> list[tuple]:
    a, b = cursors.declare(left), 0  # leak: with no room for b the early return leaves a
    if a:
        b = cursors.declare(right)  # clean: deleted after the comparison
    if not b:
        return []
    ours = set(cursors.pull(a, page))
    theirs = set(cursors.pull(b, page))
    for cursor_id in (a, b):
        del cursors.live[cursor_id]
    return sorted(ours ^ theirs)
