"""Fixed set of database connections lent out as handles."""
import sqlite3
import threading
from collections import deque


class Lent:
    def __init__(self, owner, conn):
        self._owner = owner
        self.conn = conn
        self._done = False

    def execute(self, sql, *args):
        return self.conn.execute(sql, args)

    def close(self):
        if not self._done:
            self._done = True
            self._owner._restore(self.conn)


class ConnectionShelf:
    def __init__(self, path, size):
        self._idle = deque(sqlite3.connect(path, check_same_thread=False) for _ in range(size))
        self._cond = threading.Condition()

    def obtain(self, timeout=5.0):
        with self._cond:
            if not self._cond.wait_for(lambda: len(self._idle) > 0, timeout):
                raise TimeoutError("no connection")
            return Lent(self, self._idle.popleft())

    def _restore(self, conn):
        with self._cond:
            self._idle.append(conn)
            self._cond.notify()


class OrderStore:
    def __init__(self, shelf):
        self.shelf = shelf

    def find(self, order_id):
        lent = self.shelf.obtain()  # leak: not closed when no row is found
        row = lent.execute("select * from orders where id=?", order_id).fetchone()
        if row is None:
            return None
        lent.close()
        return dict(zip(("id", "sku", "qty"), row))

    def count(self, sku):
        lent = self.shelf.obtain()  # clean: closed in finally
        try:
            return lent.execute("select count(*) from orders where sku=?", sku).fetchone()[0]
        finally:
            lent.close()

    def session(self):
        return self.shelf.obtain()  # clean: handed to the caller

    def archive(self, ids):
        lent = self.session()  # clean: closed at the end
        for order_id in ids:
            lent.execute("update orders set archived=1 where id=?", order_id)
        lent.close()


def warm_up(shelf):
    probe = shelf.obtain()  # leak: never closed
    probe.execute("select 1")
