"""Cursors over dataset shards: a fixed number may be open at once."""


class Cursor:
    def __init__(self, catalog, shard):
        self.catalog = catalog
        self.shard = shard
        self.pos = 0

    def fetch(self, n):
        rows = self.catalog.rows[self.shard][self.pos:self.pos + n]
        self.pos += len(rows)
        return rows


class ShardCatalog:
    def __init__(self, rows, max_open=4):
        self.rows = rows
        self.max_open = max_open
        self._cursors = []

    def open_cursor(self, shard):
        if len(self._cursors) >= self.max_open:
            raise RuntimeError("too many cursors")
        cur = Cursor(self, shard)
        self._cursors.append(cur)
        return cur

    def close_cursor(self, cur):
        self._cursors = [c for c in self._cursors if c is not cur]


class Loader:
    def __init__(self, catalog: ShardCatalog, tok):
        self.catalog = catalog
        self.tok = tok

    def epoch(self, shard):
        cur = self.catalog.open_cursor(shard)  # clean: closed in the generator's finally
        try:
            while rows := cur.fetch(64):
                yield [self.tok(r) for r in rows]
        finally:
            self.catalog.close_cursor(cur)

    def peek(self, shard):
        cur = self.catalog.open_cursor(shard)  # leak: returns the rows with the cursor open
        rows = cur.fetch(1)
        if rows:
            return self.tok(rows[0])
        self.catalog.close_cursor(cur)
        return None

    def skip_empty(self, shards):
        found = []
        for shard in shards:
            cur = self.catalog.open_cursor(shard)  # leak: an empty shard continues with the cursor open
            if not cur.fetch(1):
                continue
            found.append(shard)
            self.catalog.close_cursor(cur)
        return found

    def count(self, shard):
        cur = self.catalog.open_cursor(shard)  # clean: closed after the loop
        total = 0
        while rows := cur.fetch(256):
            total += len(rows)
        self.catalog.close_cursor(cur)
        return total
