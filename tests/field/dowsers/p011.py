"""Mixture-of-experts weight cache with pinned entries."""


class _Entry:
    def __init__(self, weights):
        self.weights = weights
        self.pins = 0
        self.stamp = 0


class ExpertCache:
    def __init__(self, loader, capacity):
        self._loader = loader
        self._capacity = capacity
        self._entries = {}
        self._clock = 0

    def pin(self, expert):
        if expert not in self._entries:
            self._make_room()
            self._entries[expert] = _Entry(self._loader(expert))
        entry = self._entries[expert]
        self._clock += 1
        entry.stamp = self._clock
        entry.pins += 1
        return entry.weights

    def unpin(self, expert):
        self._entries[expert].pins -= 1

    def _make_room(self):
        while len(self._entries) >= self._capacity:
            cold = [(e.stamp, k) for k, e in self._entries.items() if e.pins == 0]
            if not cold:
                raise MemoryError("every expert is pinned")
            del self._entries[min(cold)[1]]


class MoeLayer:
    def __init__(self, cache: ExpertCache):
        self.cache = cache

    def apply_one(self, expert, x):
        w = self.cache.pin(expert)  # clean: unpinned in finally
        try:
            return x @ w
        finally:
            self.cache.unpin(expert)

    def dispatch(self, groups, out):
        for expert, rows in groups.items():
            w = self.cache.pin(expert)  # leak: an empty group continues with the pin held
            if len(rows) == 0:
                continue
            out[rows] += rows.hidden @ w
            self.cache.unpin(expert)

    def shared(self, x, gate):
        w = self.cache.pin(0)  # leak: the ungated way never unpins
        y = x @ w
        if gate is not None:
            y = gate * y
            self.cache.unpin(0)
        return y

    def norm(self, expert):
        w = self.cache.pin(expert)  # clean: unpinned before the return
        value = abs(w).max()
        self.cache.unpin(expert)
        return value
