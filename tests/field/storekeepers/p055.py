class Savepoint:
    def __init__(self, name, slot):
        self.name = name
        self.slot = slot
        self.changes = []


class UndoSlots:
    def __init__(self, n):
        self.empty = list(range(n))
        self.in_use = {}

    def open_slot(self, owner):
        slot = self.empty.pop()
        self.in_use[slot] = owner
        return slot

    def free_slot(self, slot):
        if slot in self.in_use:
            del self.in_use[slot]
            self.empty.append(slot)


class Transaction:
    """A stack of savepoints, innermost last."""

    def __init__(self, slots, name):
        self.slots = slots
        self.name = name
        self.root = slots.open_slot(name)  # clean: commit and rollback free it
        self.stack = []
        self.applied = []

    def savepoint(self, name):
        slot = self.slots.open_slot(name)  # leak: rollback_to cuts the stack without freeing slots
        self.stack.append(Savepoint(name, slot))

    def change(self, row, value):
        target = self.stack[-1].changes if self.stack else self.applied
        target.append((row, value))

    def rollback_to(self, name):
        names = [sp.name for sp in self.stack]
        if name not in names:
            return 0
        at = names.index(name)
        lost = sum(len(sp.changes) for sp in self.stack[at:])
        del self.stack[at:]
        return lost

    def release(self):
        if not self.stack:
            return
        sp = self.stack.pop()
        target = self.stack[-1].changes if self.stack else self.applied
        target.extend(sp.changes)
        self.slots.free_slot(sp.slot)

    def commit(self):
        while self.stack:
            self.release()
        self.slots.free_slot(self.root)
        return list(self.applied)

    def rollback(self):
        for sp in self.stack:
            self.slots.free_slot(sp.slot)
        self.stack.clear()
        self.applied.clear()
        self.slots.free_slot(self.root)


class TempTables:
    def __init__(self, slots):
        self.slots = slots
        self.tables = {}

    def create(self, name, columns):
        if name in self.tables:
            return False
        self.tables[name] = (self.slots.open_slot(name), columns)  # leak: rename loses a table of that name
        return True

    def rename(self, old, new):
        self.tables[new] = self.tables.pop(old)

    def drop(self, name):
        slot, _ = self.tables.pop(name)
        self.slots.free_slot(slot)
