"""Shared memory segments attached by name, unlinked when the last one detaches."""
from multiprocessing import shared_memory


class Segments:
    def __init__(self):
        self._table = {}

    def attach(self, name, size=0):
        entry = self._table.get(name)
        if entry is None:
            shm = shared_memory.SharedMemory(name=name, create=size > 0, size=size)
            entry = self._table[name] = [shm, 0]
        entry[1] += 1
        return entry[0].buf

    def detach(self, name):
        entry = self._table[name]
        entry[1] -= 1
        if entry[1] <= 0:
            entry[0].close()
            del self._table[name]

    def attached(self, name):
        return self._table.get(name, (None, 0))[1]


class FrameBus:
    def __init__(self, segments, name):
        self.segments = segments
        self.name = name
        self.buf = None

    def connect(self):
        self.buf = self.segments.attach(self.name)  # clean: stored, detached by disconnect

    def disconnect(self):
        self.buf = None
        self.segments.detach(self.name)

    def latest(self):
        buf = self.segments.attach(self.name)  # leak: no frame yet, no detach
        if buf[0] == 0:
            return None
        frame = bytes(buf[1:])
        self.segments.detach(self.name)
        return frame


def copy_segment(segments, src, dst):
    a = segments.attach(src)  # clean: detached in finally
    try:
        b = segments.attach(dst, len(a))  # clean: detached by the inner finally
        try:
            b[: len(a)] = a
        finally:
            segments.detach(dst)
    finally:
        segments.detach(src)


def total_size(segments, names):
    total = 0
    for name in names:
        total += len(segments.attach(name))  # leak: attached for its length only
    return total
