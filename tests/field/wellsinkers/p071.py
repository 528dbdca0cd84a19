"""Snapshots of a log-structured store: sequence numbers held in a sorted list."""
from bisect import bisect_left, insort


class LsmStore:
    def __init__(self):
        self.sequence = 0
        self._versions = {}
        self._held = []

    def put(self, key, value):
        self.sequence += 1
        self._versions.setdefault(key, []).append((self.sequence, value))

    def get_snapshot(self):
        insort(self._held, self.sequence)
        return self.sequence

    def release_snapshot(self, seq):
        i = bisect_left(self._held, seq)
        if i < len(self._held) and self._held[i] == seq:
            del self._held[i]

    def get(self, key, seq):
        for at, value in reversed(self._versions.get(key, ())):
            if at <= seq:
                return value
        return None

    def compact(self):
        floor = self._held[0] if self._held else self.sequence
        for versions in self._versions.values():
            keep = max((i for i, v in enumerate(versions) if v[0] <= floor), default=0)
            del versions[:keep]


class Reporter:
    def __init__(self, store):
        self.store = store

    def pair(self, a, b):
        seq = self.store.get_snapshot()  # clean: released in finally
        try:
            return self.store.get(a, seq), self.store.get(b, seq)
        finally:
            self.store.release_snapshot(seq)

    def pin_view(self):
        return self.store.get_snapshot()  # clean: handed to the caller

    def changed(self, keys, work):
        seq = self.pin_view()  # leak: the changed key returns with the snapshot
        work()
        for key in keys:
            if self.store.get(key, seq) != self.store.get(key, self.store.sequence):
                return key
        self.store.release_snapshot(seq)
        return None


def current(store):
    store.get_snapshot()  # leak: result dropped
    return store.sequence
