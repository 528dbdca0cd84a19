import heapq


class ExpertRow:
    def __init__(self, row):
        self.row = row
        self.tokens = 0


class RowStore:
    def __init__(self, rows):
        self.rows = [ExpertRow(r) for r in range(rows)]

    def lease_row(self):
        return self.rows.pop() if self.rows else None

    def settle_row(self, row):
        row.tokens = 0
        self.rows.append(row)


class ExpertCache:
    """Expert rows by (layer, expert), with a heap of (uses, key) for eviction."""

    def __init__(self, store, load):
        self.store = store
        self.load = load
        self.rows = {}
        self.uses = {}
        self.heap = []
        self.shared = store.lease_row()  # clean: close settles it

    def get(self, layer, expert):
        key = (layer, expert)
        if key in self.rows:
            self.uses[key] += 1
            return self.rows[key].row
        row = self.store.lease_row()  # leak: drop_layer deletes the rows of a layer unsettled
        if row is None:
            return self.shared.row
        self.load(layer, expert, row.row)
        self.rows[key] = row
        self.uses[key] = 1
        heapq.heappush(self.heap, (1, key))
        return row.row

    def evict(self, count):
        freed = 0
        while self.heap and freed < count:
            uses, key = heapq.heappop(self.heap)
            if key not in self.rows:
                continue
            if self.uses[key] > uses:
                heapq.heappush(self.heap, (self.uses[key], key))
                continue
            self.store.settle_row(self.rows.pop(key))
            del self.uses[key]
            freed += 1
        return freed

    def drop_layer(self, layer):
        for key in [k for k in self.rows if k[0] == layer]:
            del self.rows[key]
            del self.uses[key]

    def close(self):
        for row in self.rows.values():
            self.store.settle_row(row)
        self.rows = {}
        self.heap = []
        self.store.settle_row(self.shared)


def preload(store, experts, load):
    taken = []
    for expert in experts:
        row = store.lease_row()  # clean: handed to the caller in the list
        if row is None:
            break
        load(0, expert, row.row)
        taken.append(row)
    return taken


def benchmark(store, experts, load, clock):
    started = clock()
    rows = preload(store, experts, load)  # leak: every second one is settled only
    for row in rows[::2]:
        store.settle_row(row)
    return clock() - started
