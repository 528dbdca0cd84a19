"""Cursor sharing in a report generator, through nested generators."""
from contextlib import closing


class CursorPool:
    def __init__(self, cursors):
        self._idle = list(cursors)

    def open_cursor(self):
        return self._idle.pop()

    def close_cursor(self, cursor):
        cursor.reset()
        self._idle.append(cursor)


def rows(pool, sql):
    cursor = pool.open_cursor()  # clean: finally closes it, at the latest with the generator
    try:
        cursor.execute(sql)
        yield from cursor
    finally:
        pool.close_cursor(cursor)


def pages(pool, sql, size):
    cursor = pool.open_cursor()  # clean: closed when the consumer reads to the end
    cursor.execute(sql)
    page = cursor.fetchmany(size)
    while page:
        yield page
        page = cursor.fetchmany(size)
    pool.close_cursor(cursor)


def numbered(pool, sql, size):
    yield from enumerate(pages(pool, sql, size), 1)  # clean: handed on to the consumer


def total(pool, table):
    out = 0
    with closing(rows(pool, f"select amount from {table}")) as source:  # clean: closing ends the generator
        for (amount,) in source:
            if amount is None:
                break
            out += amount
    return out


def export(pool, table, writer):
    count = 0
    for number, page in numbered(pool, f"select * from {table}", 500):  # clean: read to the end
        writer.write(number, page)
        count += len(page)
    return count


def first_page(pool, table):
    return next(pages(pool, f"select * from {table}", 50), [])  # leak: stopped at its first yield


def find(pool, table, key):
    for number, page in numbered(pool, f"select id from {table}", 200):  # leak: returns from the loop
        if (key,) in page:
            return number
    return None
