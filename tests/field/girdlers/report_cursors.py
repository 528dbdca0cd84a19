"""Reporting: server-side cursors over a database handle, wrapped by readers, joined by generators."""
import csv
import io
import itertools
from collections import OrderedDict


class Cursor:
    def __init__(self, name, rows):
        self.name = name
        self.rows = iter(rows)
        self.closed = False

    def fetch(self, count):
        return list(itertools.islice(self.rows, count))


class Database:
    """open_cursor() takes one of a bounded number of server cursors, close_cursor() returns it."""

    def __init__(self, tables, max_cursors=32):
        self.tables = tables
        self.max_cursors = max_cursors
        self.live = {}
        self._names = itertools.count(1)

    def open_cursor(self, table, order_by=None):
        if len(self.live) >= self.max_cursors:
            raise RuntimeError("too many cursors")
        rows = self.tables.get(table, [])
        if order_by is not None:
            rows = sorted(rows, key=lambda row: row[order_by])
        cursor = Cursor(f"c{next(self._names)}", rows)
        self.live[cursor.name] = cursor
        return cursor

    def close_cursor(self, cursor):
        cursor.closed = True
        self.live.pop(cursor.name, None)


class Reader:
    """Row-wise view of a cursor. Owns the cursor unless told otherwise."""

    def __init__(self, db, cursor, owns=True, block=100):
        self.db = db
        self.cursor = cursor
        self.owns = owns
        self.block = block
        self.buffer = []

    def __iter__(self):
        while True:
            self.buffer = self.cursor.fetch(self.block)
            if not self.buffer:
                return
            yield from self.buffer

    def close(self):
        self.buffer = []
        if self.owns:
            self.db.close_cursor(self.cursor)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def table_reader(db, table, order_by=None):
    cursor = db.open_cursor(table, order_by)  # clean: the reader owns it and is handed to the caller
    return Reader(db, cursor)


def filtered_reader(db, table, order_by, block):
    reader = table_reader(db, table, order_by)  # clean: wrapper of a wrapper, handed to the caller
    reader.block = max(10, block)
    return reader


def monthly_sums(db, table):
    sums = OrderedDict()
    with table_reader(db, table, "month") as reader:  # clean: the reader closes its cursor
        for row in reader:
            sums[row["month"]] = sums.get(row["month"], 0) + row["amount"]
    return sums


def preview(db, table, count):
    cursor = db.open_cursor(table)  # leak: the reader over it does not own it, nobody closes the cursor
    reader = Reader(db, cursor, owns=False, block=count)
    rows = list(itertools.islice(reader, count))
    reader.close()
    return rows


def header(db, table):
    cursor = db.open_cursor(table)  # clean: near miss, the reader does not own it but it is closed here
    reader = Reader(db, cursor, owns=False, block=1)
    names = [sorted(row) for row in itertools.islice(reader, 1)]
    reader.close()
    db.close_cursor(cursor)
    return names[0] if names else []


def to_csv(db, table, columns):
    out = io.StringIO()
    writer = csv.writer(out)
    reader = filtered_reader(db, table, columns[0], 500)  # leak: a row without the columns ends it unclosed
    writer.writerow(columns)
    for row in reader:
        if not all(column in row for column in columns):
            return ""
        writer.writerow([row[column] for column in columns])
    reader.close()
    return out.getvalue()


def largest(db, table, key, floor):
    best = None
    reader = filtered_reader(db, table, key, 500)  # clean: near miss, break still reaches the close
    for row in reader:
        if row[key] < floor:
            continue
        best = row
        if row.get("final"):
            break
    reader.close()
    return best


def merge_join(db, left_table, right_table, key):
    """Generator over pairs of rows with the same key; both tables are sorted by it."""
    left = db.open_cursor(left_table, key)  # clean: closed in finally
    right = db.open_cursor(right_table, key)  # leak: only the left cursor is closed when the join ends
    try:
        a, b = left.fetch(1), right.fetch(1)
        while a and b:
            if a[0][key] < b[0][key]:
                a = left.fetch(1)
            elif a[0][key] > b[0][key]:
                b = right.fetch(1)
            else:
                yield a[0], b[0]
                a = left.fetch(1)
    finally:
        db.close_cursor(left)


def union(db, tables, order_by):
    """Rows of all tables, table after table."""
    for table in tables:
        cursor = db.open_cursor(table, order_by)  # clean: closed in finally before the next table
        try:
            while rows := cursor.fetch(200):
                yield from rows
        finally:
            db.close_cursor(cursor)


class CursorCache:
    """Keeps open cursors by table for repeated paging; the eldest is closed when there are too many."""

    def __init__(self, db, depth):
        self.db = db
        self.depth = depth
        self.entries = OrderedDict()

    def page(self, table, count):
        cursor = self.entries.get(table)
        if cursor is None:
            cursor = self.db.open_cursor(table)  # clean: near miss, eviction, the last page or clear close it
            self.entries[table] = cursor
            if len(self.entries) > self.depth:
                _, eldest = self.entries.popitem(last=False)
                self.db.close_cursor(eldest)
        self.entries.move_to_end(table)
        rows = cursor.fetch(count)
        if len(rows) < count:
            self.db.close_cursor(self.entries.pop(table))
        return rows

    def clear(self):
        while self.entries:
            _, cursor = self.entries.popitem()
            self.db.close_cursor(cursor)


class PagedReport:
    """One cursor per running report id, for paging over requests."""

    def __init__(self, db):
        self.db = db
        self.running = {}

    def start(self, report_id, table, order_by):
        cursor = self.db.open_cursor(table, order_by)  # leak: the last page drops the entry only
        self.running[report_id] = [cursor, 0]

    def next_page(self, report_id, count):
        entry = self.running.get(report_id)
        if entry is None:
            return []
        rows = entry[0].fetch(count)
        entry[1] += len(rows)
        if len(rows) < count:
            del self.running[report_id]
        return rows

    def abort(self, report_id):
        entry = self.running.pop(report_id, None)
        if entry is not None:
            self.db.close_cursor(entry[0])
