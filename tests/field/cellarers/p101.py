"""Order import service: database connections."""
import collections
import sqlite3
import threading


class ConnectionStore:
    def __init__(self, dsn, ceiling=8):
        self._dsn = dsn
        self._ceiling = ceiling
        self._idle = collections.deque()
        self._lent = 0
        self._cv = threading.Condition()

    def lend(self):
        with self._cv:
            while not self._idle and self._lent >= self._ceiling:
                self._cv.wait()
            self._lent += 1
            if self._idle:
                return self._idle.pop()
        return sqlite3.connect(self._dsn, check_same_thread=False)

    def give_back(self, conn):
        with self._cv:
            self._lent -= 1
            self._idle.append(conn)
            self._cv.notify()


class OrderImporter:
    def __init__(self, store):
        self.store = store

    def import_rows(self, rows):
        conn = self.store.lend()  # clean: given back in finally
        try:
            conn.executemany("INSERT INTO orders(id, total) VALUES (?, ?)", rows)
            conn.commit()
        finally:
            self.store.give_back(conn)

    def find_total(self, order_id):
        conn = self.store.lend()  # leak: the early return for a missing order keeps the connection
        row = conn.execute("SELECT total FROM orders WHERE id = ?", (order_id,)).fetchone()
        if row is None:
            return 0
        self.store.give_back(conn)
        return row[0]

    def table_exists(self, name):
        conn = self.store.lend()  # clean: given back before both answers
        row = conn.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        self.store.give_back(conn)
        if row:
            return True
        return False

    def warm_up(self, count):
        for _ in range(count):
            conn = self.store.lend()  # leak: none of the connections goes back
            conn.execute("PRAGMA cache_size = -4000")
