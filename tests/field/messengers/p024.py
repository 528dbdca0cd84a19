"""Write batches of a key-value engine, guarded by a context manager class."""
import time


class BatchSlots:
    def __init__(self, count):
        self._free = list(range(count))

    def enter(self):
        return self._free.pop()

    def leave(self, slot):
        self._free.append(slot)


class Batch:
    def __init__(self, slots, wal):
        self.slots = slots
        self.wal = wal
        self.ops = []

    def __enter__(self):
        self.slot = self.slots.enter()  # clean: __exit__ leaves it
        return self

    def __exit__(self, kind, exc, tb):
        if kind is None and self.ops:
            self.wal.append(self.slot, self.ops)
        self.slots.leave(self.slot)
        return False

    def put(self, key, value):
        self.ops.append((key, value))


class Finisher:
    """Ends a slot that was entered before."""

    def __init__(self, slots, wal, slot):
        self.slots = slots
        self.wal = wal
        self.slot = slot
        self.ops = []

    def __enter__(self):
        return self.ops

    def __exit__(self, kind, exc, tb):
        if not self.ops:
            return False
        self.wal.append(self.slot, self.ops)
        self.slots.leave(self.slot)
        return False


class Engine:
    def __init__(self, slots, wal):
        self.slots = slots
        self.wal = wal
        self.started = time.time()

    def store(self, pairs):
        with Batch(self.slots, self.wal) as batch:  # clean: __exit__ always leaves
            for key, value in pairs:
                if key is None:
                    return False
                batch.put(key, value)
        return True

    def import_rows(self, rows):
        slot = self.slots.enter()  # leak: without a valid row __exit__ returns before leave
        with Finisher(self.slots, self.wal, slot) as ops:
            ops.extend((row["k"], row["v"]) for row in rows if "k" in row)
        return len(ops)

    def checkpoint(self):
        slot = self.slots.enter()  # clean: the marker makes the operations non-empty
        with Finisher(self.slots, self.wal, slot) as ops:
            ops.append(("checkpoint", time.time()))

    def age(self):
        batch = Batch(self.slots, self.wal)
        oldest = batch.__enter__()  # leak: entered by hand, never exited
        return time.time() - self.started, len(oldest.ops)
