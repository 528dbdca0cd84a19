"""Server-side cursors, told to clients as numbers."""
import itertools


class CursorRegistry:
    LIMIT = 128

    def __init__(self):
        self._seq = itertools.count(1)
        self._open = {}

    def open_cursor(self, rows):
        if len(self._open) >= self.LIMIT:
            raise RuntimeError("too many open cursors")
        cid = next(self._seq)
        self._open[cid] = iter(rows)
        return cid

    def fetch(self, cid, n):
        return list(itertools.islice(self._open[cid], n))

    def close_cursor(self, cid):
        self._open.pop(cid, None)


class QueryFrontend:
    def __init__(self, registry):
        self.registry = registry
        self.client_cursors = {}

    def first_row(self, rows):
        cid = self.registry.open_cursor(rows)  # leak: not closed where the result is empty
        got = self.registry.fetch(cid, 1)
        if got:
            self.registry.close_cursor(cid)
            return got[0]
        return None

    def start(self, client, rows):
        self.client_cursors[client] = self.registry.open_cursor(rows)  # clean: closed by stop()

    def stop(self, client):
        cid = self.client_cursors.pop(client, None)
        if cid is not None:
            self.registry.close_cursor(cid)

    def contains(self, rows, wanted):
        cid = self.registry.open_cursor(rows)  # leak: a match returns straight out of the loop
        while batch := self.registry.fetch(cid, 50):
            if wanted in batch:
                return True
        self.registry.close_cursor(cid)
        return False

    def export(self, rows, write):
        cid = self.registry.open_cursor(rows)  # clean: closed in finally
        try:
            while batch := self.registry.fetch(cid, 500):
                write(batch)
        finally:
            self.registry.close_cursor(cid)
