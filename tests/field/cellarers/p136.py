"""Undo segments of the storage engine, as a free list threaded through arrays."""
NIL = -1


class UndoSegments:
    def __init__(self, n):
        self.next = list(range(1, n)) + [NIL]
        self.first = 0
        self.records = [[] for _ in range(n)]

    def attach(self):
        seg = self.first
        if seg == NIL:
            return NIL
        self.first = self.next[seg]
        return seg

    def note(self, seg, key, before):
        self.records[seg].append((key, before))

    def rollback(self, seg, data):
        for key, before in reversed(self.records[seg]):
            data[key] = before
        self.detach(seg)

    def detach(self, seg):
        self.records[seg].clear()
        self.next[seg] = self.first
        self.first = seg


class Engine:
    def __init__(self, undo):
        self.undo = undo
        self.data = {}

    def update_all(self, changes, check):
        seg = self.undo.attach()  # clean: rolled back or detached
        if seg == NIL:
            return False
        for key, value in changes.items():
            self.undo.note(seg, key, self.data.get(key))
            self.data[key] = value
        if not check(self.data):
            self.undo.rollback(seg, self.data)
            return False
        self.undo.detach(seg)
        return True

    def increment(self, key, limit):
        seg = self.undo.attach()  # leak: at the limit it returns with the segment attached
        if seg == NIL:
            return None
        value = self.data.get(key, 0)
        if value >= limit:
            return value
        self.undo.note(seg, key, value)
        self.data[key] = value + 1
        self.undo.detach(seg)
        return value + 1

    def touch(self, keys):
        for key in keys:
            seg = self.undo.attach()  # leak: never detached for keys that exist
            if seg == NIL:
                return
            if key not in self.data:
                self.data[key] = None
                self.undo.detach(seg)
