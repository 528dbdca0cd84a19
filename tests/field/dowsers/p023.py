"""Slab allocator for request metadata; the lease is a handle object with close()."""


class SlabHandle:
    __slots__ = ("_slab", "_index", "open")

    def __init__(self, slab, index):
        self._slab = slab
        self._index = index
        self.open = True

    def view(self):
        size = self._slab.item
        return memoryview(self._slab.data)[self._index * size:(self._index + 1) * size]

    def close(self):
        if self.open:
            self.open = False
            self._slab._vacant.append(self._index)


class Slab:
    def __init__(self, item, count):
        self.item = item
        self.data = bytearray(item * count)
        self._vacant = list(range(count - 1, -1, -1))

    def new(self):
        if not self._vacant:
            raise MemoryError("slab is full")
        return SlabHandle(self, self._vacant.pop())


class MetaStore:
    def __init__(self, slab: Slab):
        self.slab = slab
        self.by_id = {}

    def insert(self, rid, payload):
        handle = self.slab.new()  # clean: stored, remove() closes it
        handle.view()[:len(payload)] = payload
        self.by_id[rid] = handle

    def remove(self, rid):
        self.by_id.pop(rid).close()

    def roundtrip(self, payload):
        handle = self.slab.new()  # clean: closed in finally
        try:
            handle.view()[:len(payload)] = payload
            return bytes(handle.view())
        finally:
            handle.close()

    def import_many(self, items):
        for rid, payload in items:
            handle = self.slab.new()  # leak: an oversized payload continues with the handle open
            if len(payload) > self.slab.item:
                continue
            handle.view()[:len(payload)] = payload
            self.by_id[rid] = handle

    def capacity_probe(self, payload):
        handle = self.slab.new()  # leak: closed only when the payload fits
        fits = len(payload) <= len(handle.view())
        if fits:
            handle.close()
        return fits
