"""Keys and values in parallel lists, as older code does it."""


class RowPool:
    def __init__(self, width):
        self.width = width
        self.rows = []

    def alloc_row(self):
        if self.rows:
            return self.rows.pop()
        return [0.0] * self.width

    def free_row(self, row):
        self.rows.append(row)


class Cache:
    def __init__(self, width):
        self.pool = RowPool(width)
        self.keys = []
        self.values = []
        self.tags = []

    def add(self, tag):
        self.tags.append(tag)
        self.keys.append(self.pool.alloc_row())  # clean: near miss, remove and clear free both lists
        self.values.append(self.pool.alloc_row())  # clean: near miss, remove and clear free both lists

    def remove(self, tag):
        i = self.tags.index(tag)
        del self.tags[i]
        self.pool.free_row(self.keys.pop(i))
        self.pool.free_row(self.values.pop(i))

    def clear(self):
        for rows in (self.keys, self.values):
            for row in rows:
                self.pool.free_row(row)
            rows.clear()
        self.tags.clear()


class PairCache:
    def __init__(self, width):
        self.pool = RowPool(width)
        self.pairs = {}

    def add(self, tag):
        if tag in self.pairs:
            return
        key = self.pool.alloc_row()  # clean: near miss, first of the tuple, freed by remove
        value = self.pool.alloc_row()  # leak: second of the tuple, remove frees the first only
        self.pairs[tag] = (key, value)

    def remove(self, tag):
        key, value = self.pairs.pop(tag)
        self.pool.free_row(key)
        return sum(value)

    def average(self, n):
        rows = [self.pool.alloc_row() for _ in range(n)]  # clean: near miss, while loop pops them all
        total = 0.0
        while rows:
            row = rows.pop()
            total += sum(row)
            self.pool.free_row(row)
        return total / max(n, 1)

    def average_nonzero(self, n):
        rows = [self.pool.alloc_row() for _ in range(n)]  # leak: rows that sum to zero are popped and passed over
        total = 0.0
        while rows:
            row = rows.pop()
            if not sum(row):
                continue
            total += sum(row)
            self.pool.free_row(row)
        return total / max(n, 1)

    def transpose(self, n):
        rows = []
        for _ in range(n):
            rows += [self.pool.alloc_row()]  # clean: near miss, added with += and freed over an index
        columns = [list(c) for c in zip(*rows)]
        for i in range(len(rows)):
            self.pool.free_row(rows[i])
        return columns

    def blend(self, n):
        rows = [self.pool.alloc_row()]  # leak: the list is replaced before the loop that frees
        rows = [self.pool.alloc_row() for _ in range(n)]  # clean: freed in the loop
        total = sum(map(sum, rows))
        for row in rows:
            self.pool.free_row(row)
        return total
