# take: P.fork(n)
# give: P.prune(X)
# gets: value
# type: BeamRows
class BeamOverflow(Exception):
    pass


class BeamRows:
    """A chain of vacant rows threaded through an array (next-index links)."""

    END = None

    def __init__(self, rows):
        self._next = [i + 1 for i in range(rows)]
        if rows:
            self._next[-1] = self.END
        self._first = 0 if rows else self.END
        self.vacant = rows

    def _pop_row(self):
        row = self._first
        self._first = self._next[row]
        self._next[row] = row      # linked to itself: in use
        self.vacant -= 1
        return row

    def fork(self, width):
        if width > self.vacant:
            raise BeamOverflow(f"want {width} beams, {self.vacant} rows vacant")
        return [self._pop_row() for _ in range(width)]

    def prune(self, rows):
        for row in rows:
            if self._next[row] != row:
                raise ValueError(f"row {row} pruned twice")
            self._next[row] = self._first
            self._first = row
            self.vacant += 1
