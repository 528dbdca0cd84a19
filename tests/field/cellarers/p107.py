from collections import Counter


class VersionedTable:
    def __init__(self, rows):
        self.current = 1
        self._rows = {1: dict(rows)}
        self._readers = Counter()

    def publish(self, changes):
        nxt = dict(self._rows[self.current])
        nxt.update(changes)
        self.current += 1
        self._rows[self.current] = nxt
        self._sweep()

    def enter(self):
        self._readers[self.current] += 1
        return self.current

    def leave(self, version):
        self._readers[version] -= 1
        if not self._readers[version]:
            del self._readers[version]
        self._sweep()

    def at(self, version):
        return self._rows[version]

    def _sweep(self):
        oldest = min(self._readers, default=self.current)
        for v in [v for v in self._rows if v < oldest]:
            del self._rows[v]


def route(table, dest):
    v = table.enter()  # clean: left in finally
    try:
        return table.at(v).get(dest)
    finally:
        table.leave(v)


def longest_prefix(table, dest):
    v = table.enter()  # leak: the return out of the loop keeps the version open
    rows = table.at(v)
    for n in range(len(dest), 0, -1):
        if dest[:n] in rows:
            return rows[dest[:n]]
    table.leave(v)
    return None


def follow(table, steps, sink):
    v = table.enter()  # leak: the first version is overwritten by the ones taken in the loop
    for _ in range(steps):
        v = table.enter()  # clean: left in the same turn
        sink(table.at(v))
        table.leave(v)


def open_view(table):
    return table.enter()  # clean: handed to the caller


def dump_size(table):
    v = open_view(table)  # clean: left after the length is known
    n = len(table.at(v))
    table.leave(v)
    return n
