"""Reader table of a memory-mapped store: a row holds the transaction a reader looks at."""
import os

import numpy as np

ROW = np.dtype([("pid", np.int64), ("txn", np.int64)])


class ReaderTable:
    def __init__(self, rows=126):
        self.rows = np.zeros(rows, dtype=ROW)
        self.rows["txn"] = -1
        self.last_txn = 0

    def renew_reader(self):
        free = np.flatnonzero(self.rows["pid"] == 0)
        if free.size == 0:
            return None
        r = int(free[0])
        self.rows[r] = (os.getpid(), self.last_txn)
        return r

    def reset_reader(self, r):
        self.rows[r] = (0, -1)

    def oldest(self):
        live = self.rows["txn"][self.rows["pid"] != 0]
        return int(live.min()) if live.size else self.last_txn


class Environment:
    def __init__(self, table, pages):
        self.table = table
        self.pages = pages

    def get(self, key):
        r = self.table.renew_reader()  # leak: a key not in the root returns with the row
        if r is None:
            return None
        page = self.pages.root(self.table.rows["txn"][r])
        if key not in page:
            return None
        value = bytes(page[key])
        self.table.reset_reader(r)
        return value

    def keys(self):
        r = self.table.renew_reader()  # clean: reset in finally
        if r is None:
            return []
        try:
            return list(self.pages.root(self.table.rows["txn"][r]))
        finally:
            self.table.reset_reader(r)

    def stat(self):
        r = self.table.renew_reader()  # clean: reset after the touch
        if r is not None:
            self.pages.touch(self.table.rows["txn"][r])
            self.table.reset_reader(r)


def follow(env, reader_count):
    seen = set()
    for _ in range(reader_count):
        r = env.table.renew_reader()  # leak: the rows seen are kept as numbers of transactions
        if r is None:
            break
        seen.add(int(env.table.rows["txn"][r]))
    return seen
