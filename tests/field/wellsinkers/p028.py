"""Server-side cursors, at most so many a session."""
import secrets


class Cursor:
    def __init__(self, rows):
        self.rows = rows
        self.at = 0

    def fetch(self, n):
        chunk = self.rows[self.at:self.at + n]
        self.at += len(chunk)
        return chunk


class CursorTable:
    def __init__(self, cap):
        self.cap = cap
        self._by_name = {}

    def declare(self, rows):
        if len(self._by_name) >= self.cap:
            raise RuntimeError("too many open cursors")
        name = "c" + secrets.token_hex(6)
        self._by_name[name] = Cursor(rows)
        return name

    def __getitem__(self, name):
        return self._by_name[name]

    def close_cursor(self, name):
        self._by_name.pop(name, None)


class Session:
    def __init__(self, table, engine):
        self.table = table
        self.engine = engine

    def query(self, sql):
        return self.table.declare(self.engine.run(sql))  # clean: the name goes to the client

    def first(self, sql):
        name = self.table.declare(self.engine.run(sql))  # leak: closed only when empty
        chunk = self.table[name].fetch(1)
        if not chunk:
            self.table.close_cursor(name)
            return None
        return chunk[0]

    def copy(self, sql, sink):
        name = self.table.declare(self.engine.run(sql))  # clean: closed in finally
        try:
            while chunk := self.table[name].fetch(100):
                sink.extend(chunk)
        finally:
            self.table.close_cursor(name)


def compare(session, left, right):
    a = session.query(left)  # clean: closed below
    b = session.query(right)  # leak: only the left one is closed
    same = session.table[a].rows == session.table[b].rows
    session.table.close_cursor(a)
    return same
