"""Leases kept per (layer, head) in nested tables."""
from collections import defaultdict


class CellPool:
    def __init__(self):
        self._next = 0
        self._returned = []

    def lease_cell(self):
        if self._returned:
            return self._returned.pop()
        self._next += 1
        return self._next

    def end_lease(self, cell):
        self._returned.append(cell)


class LayerTable:
    def __init__(self, layers, heads):
        self.pool = CellPool()
        self.layers = layers
        self.heads = heads
        self.cells = {}
        self.extra = defaultdict(list)
        self.roots = {}
        self.shadow = {}

    def fill(self):
        for layer in range(self.layers):
            for head in range(self.heads):
                if (layer, head) not in self.cells:
                    self.cells[layer, head] = self.pool.lease_cell()  # clean: near miss, only for absent keys, ended in clear

    def clear(self):
        for key in sorted(self.cells):
            self.pool.end_lease(self.cells[key])
        self.cells = {}

    def add_extra(self, layer):
        self.extra[layer].append(self.pool.lease_cell())  # clean: near miss, drop_extra ends one layer, drop_all_extra the rest

    def drop_extra(self, layer):
        for cell in self.extra.pop(layer, []):
            self.pool.end_lease(cell)

    def drop_all_extra(self):
        for layer in list(self.extra):
            self.drop_extra(layer)

    def root(self, name):
        return self.roots.setdefault(name, self.pool.lease_cell())  # leak: leased also when the name is there already

    def close_roots(self):
        for cell in self.roots.values():
            self.pool.end_lease(cell)
        self.roots.clear()

    def shadow_row(self, layer):
        if layer in self.shadow:
            return False
        self.shadow[layer] = {h: self.pool.lease_cell() for h in range(self.heads)}  # leak: only the row's first head is ended
        return True

    def unshadow_row(self, layer):
        row = self.shadow.pop(layer)
        self.pool.end_lease(row[0])

    def move(self, src, dst):
        """dst takes src's cell; what dst had before is ended."""
        old = self.cells.pop(dst, None)
        if old is not None:
            self.pool.end_lease(old)
        self.cells[dst] = self.cells.pop(src)

    def replace(self, key):
        fresh = self.pool.lease_cell()  # clean: near miss, the old one is exchanged for it and ended
        stale, self.cells[key] = self.cells.get(key), fresh
        if stale is not None:
            self.pool.end_lease(stale)
