# take: P.incref_new()
# give: P.decref(X)
# gets: value
# type: CowRefTable
class CowRefTable:
    """Refcounts beside the ids; an id with count zero is free."""

    def __init__(self, ids):
        self._rc = {i: 0 for i in ids}

    def _idle_id(self):
        for i, c in self._rc.items():
            if c == 0:
                return i
        raise LookupError("all blocks are referenced")

    def incref_new(self):
        i = self._idle_id()
        self._rc[i] = 1
        return i

    def share(self, i):
        assert self._rc[i] > 0
        self._rc[i] += 1
        return i

    def decref(self, i):
        if self._rc[i] == 0:
            raise ValueError(f"refcount of block {i} would drop below zero")
        self._rc[i] -= 1
