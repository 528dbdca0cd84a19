"""A pool implemented with another pool, and the pool's own bookkeeping."""
import torch


class Pages:
    """Lowest layer: pages of a big tensor."""

    def __init__(self, n, size):
        self.memory = torch.zeros(n, size)
        self.vacant = list(range(n))

    def allocate(self):
        return self.vacant.pop()

    def free(self, page):
        self.vacant.append(page)


class Extents:
    """Middle layer: runs of pages under one handle."""

    def __init__(self, pages):
        self.pages = pages
        self.table = {}
        self.serial = 0

    def allocate(self, count):
        self.serial += 1
        self.table[self.serial] = [self.pages.allocate() for _ in range(count)]  # clean: near miss, free takes the run out of the table
        return self.serial

    def free(self, handle):
        for page in self.table.pop(handle):
            self.pages.free(page)

    def shrink(self, handle, count):
        run = self.table[handle]
        while len(run) > count:
            self.pages.free(run.pop())

    def extend(self, handle, count):
        self.table[handle].extend(self.pages.allocate() for _ in range(count))  # clean: near miss, the run is freed page by page


class Cached:
    """Top layer: keeps freed handles by size for a while."""

    def __init__(self, extents, keep=4):
        self.extents = extents
        self.keep = keep
        self.shelf = {}

    def allocate(self, count):
        shelf = self.shelf.get(count)
        if shelf:
            return shelf.pop()
        return self.extents.allocate(count)  # clean: near miss, the pool's own body hands it on

    def free(self, handle, count):
        shelf = self.shelf.setdefault(count, [])
        if len(shelf) < self.keep:
            shelf.append(handle)
        else:
            self.extents.free(handle)

    def flush(self):
        for shelf in self.shelf.values():
            while shelf:
                self.extents.free(shelf.pop())

    def prime(self, counts):
        for count in counts:
            handle = self.extents.allocate(count)  # clean: near miss, put on the shelf that flush empties
            self.shelf.setdefault(count, []).append(handle)


class Truncating:
    """Like Cached, with a bound on the shelf."""

    def __init__(self, extents):
        self.extents = extents
        self.shelf = []

    def prime(self, n, count):
        for _ in range(n):
            self.shelf.append(self.extents.allocate(count))  # leak: the slice assignment forgets all but four
        self.shelf[4:] = []

    def flush(self):
        for handle in self.shelf:
            self.extents.free(handle)
        self.shelf.clear()


def fill_pages(extents, values):
    handle = extents.allocate(len(values))  # clean: near miss, freed in the arm and behind it
    if not values:
        extents.free(handle)
        return 0.0
    run = extents.table[handle]
    for page, value in zip(run, values):
        extents.pages.memory[page].fill_(value)
    total = float(extents.pages.memory[run].sum())
    extents.free(handle)
    return total


def fill_one(pages, value):
    page = pages.allocate()  # leak: a negative value never reaches the free
    if value < 0:
        return 0.0
    pages.memory[page].fill_(value)
    total = float(pages.memory[page].sum())
    pages.free(page)
    return total


def fill_cached(cached, value, count):
    handle = cached.allocate(count)  # clean: near miss, freed with its count
    rows = cached.extents.table[handle]
    total = value * len(rows)
    cached.free(handle, count)
    return total


def fill_cached_twice(cached, value, count):
    first = cached.allocate(count)  # clean: freed below
    second = cached.allocate(count)  # leak: a total of zero skips its free
    rows = cached.extents.table[first] + cached.extents.table[second]
    total = value * len(rows)
    cached.free(first, count)
    if total:
        cached.free(second, count)
    return total
