"""Slab allocator: objects of one size, lent as (slab, cell)."""
from dataclasses import dataclass, field


@dataclass
class Slab:
    cells: int
    used: int = 0
    mask: int = 0

    def first_clear(self):
        return (~self.mask & (self.mask + 1)).bit_length() - 1


@dataclass
class SlabCache:
    per_slab: int = 64
    partial: list = field(default_factory=list)
    full: set = field(default_factory=set)

    def kmalloc(self):
        if not self.partial:
            self.partial.append(Slab(self.per_slab))
        slab, cell = self.partial[-1], self.partial[-1].first_clear()
        slab.mask |= 1 << cell
        slab.used += 1
        if slab.used == slab.cells:
            self.partial.pop()
            self.full.add(id(slab))
        return slab, cell

    def kfree(self, ref):
        slab, cell = ref
        slab.mask &= ~(1 << cell)
        slab.used -= 1
        if id(slab) in self.full:
            self.full.discard(id(slab))
            self.partial.append(slab)


class Router:
    def __init__(self, cache):
        self.cache = cache
        self.table = {}

    def learn(self, prefix, hop):
        ref = self.cache.kmalloc()  # leak: not freed when the prefix is known
        if prefix in self.table:
            return False
        self.table[prefix] = (hop, ref)
        return True

    def forget_route(self, prefix):
        _, ref = self.table.pop(prefix)
        self.cache.kfree(ref)

    def relearn(self, prefix, hop):
        if prefix in self.table:
            self.forget_route(prefix)
        self.table[prefix] = (hop, self.cache.kmalloc())  # clean: stored, freed by forget_route


def fill(cache, n, sink):
    for i in range(n):
        ref = cache.kmalloc()  # leak: odd ones are not freed
        if i % 2:
            sink.note(i)
        else:
            cache.kfree(ref)
