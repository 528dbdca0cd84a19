from collections import defaultdict


class SpaceReservation:
    def __init__(self, disk, nbytes):
        self.disk = disk
        self.nbytes = nbytes
        self.open = True

    def commit(self, actual):
        if self.open:
            self.open = False
            self.disk.reserved -= self.nbytes
            self.disk.used += actual

    def cancel(self):
        if self.open:
            self.open = False
            self.disk.reserved -= self.nbytes


class Disk:
    def __init__(self, capacity):
        self.capacity = capacity
        self.reserved = 0
        self.used = 0

    def reserve(self, nbytes):
        if self.used + self.reserved + nbytes > self.capacity:
            return None
        self.reserved += nbytes
        return SpaceReservation(self, nbytes)


class Compactor:
    """Reservations by level, each a list of (files, reservation)."""

    def __init__(self, disk):
        self.disk = disk
        self.plans = defaultdict(list)
        self.flushes = {}
        self.margin = disk.reserve(1 << 20)  # clean: stop cancels it

    def plan(self, level, files):
        res = self.disk.reserve(sum(files.values()))  # leak: replan throws a level's list away
        if res is None:
            return False
        self.plans[level].append((sorted(files), res))
        return True

    def run(self, level, merge):
        written = 0
        for names, res in self.plans.pop(level, []):
            size = merge(names)
            if size:
                res.commit(size)
            else:
                res.cancel()
            written += size
        return written

    def replan(self, level, files):
        self.plans[level] = []
        for name, size in sorted(files.items()):
            self.plan(level, {name: size})

    def start_flush(self, table, size):
        if table in self.flushes:
            return False
        res = self.disk.reserve(size)  # leak: end_flush with no bytes written settles nothing
        if res is not None:
            self.flushes[table] = res
        return res is not None

    def end_flush(self, table, actual):
        res = self.flushes.pop(table, None)
        if res is None or actual == 0:
            return 0
        res.commit(actual)
        return actual

    def stop(self):
        for level in list(self.plans):
            for _, res in self.plans.pop(level):
                res.cancel()
        for res in self.flushes.values():
            res.cancel()
        self.flushes.clear()
        if self.margin is not None:
            self.margin.cancel()
