"""Server side cursors and scratch tables. Both are scarce on the warehouse."""
from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass(eq=False)
class Cursor:
    name: str
    rows: list[dict] = field(default_factory=list)
    position: int = 0

    def fetch(self, n: int) -> list[dict]:
        page = self.rows[self.position : self.position + n]
        self.position += len(page)
        return page


@dataclass(eq=False)
class Scratch:
    table: str
    rows: list[dict] = field(default_factory=list)

    def load(self, rows: list[dict]) -> int:
        self.rows.extend(rows)
        return len(rows)


class Warehouse:
    def __init__(self, max_cursors: int = 16, max_scratch: int = 8) -> None:
        self.max_cursors = max_cursors
        self.max_scratch = max_scratch
        self._cursors: set[Cursor] = set()
        self._scratch: set[Scratch] = set()
        self._names = itertools.count(1)

    def declare_cursor(self, sql: str) -> Cursor | None:
        if len(self._cursors) >= self.max_cursors:
            return None
        cursor = Cursor(f"c{next(self._names)}")
        self._cursors.add(cursor)
        return cursor

    def close_cursor(self, cursor: Cursor) -> None:
        self._cursors.discard(cursor)

    def create_scratch(self, like: str) -> Scratch:
        scratch = Scratch(f"tmp_{like}_{next(self._names)}")
        self._scratch.add(scratch)
        return scratch

    def drop_scratch(self, scratch: Scratch) -> None:
        self._scratch.discard(scratch)

    def swap_in(self, scratch: Scratch, target: str) -> None:
        """The scratch table becomes the target; it is not a scratch table any more."""
        self._scratch.discard(scratch)


def pages(wh: Warehouse, sql: str, size: int = 500):
    cursor = wh.declare_cursor(sql)  # clean: closed when the pages are through or the loop is left
    if cursor is None:
        return
    try:
        while page := cursor.fetch(size):
            yield page
    finally:
        wh.close_cursor(cursor)


def first_row(wh: Warehouse, sql: str) -> dict | None:
    cursor = wh.declare_cursor(sql)  # leak: closed only when there is no row
    if cursor is None:
        return None
    page = cursor.fetch(1)
    if page:
        return page[0]
    wh.close_cursor(cursor)
    return None


def row_count(wh: Warehouse, sql: str) -> int:
    cursor = wh.declare_cursor(sql)  # clean: closed after the last page
    if cursor is None:
        return -1
    n = 0
    while True:
        page = cursor.fetch(1000)
        if not page:
            break
        n += len(page)
    wh.close_cursor(cursor)
    return n
