"""Byte budget shared by the decoders of one process."""
import threading


class HeapBudget:
    def __init__(self, limit):
        self.limit = limit
        self._used = 0
        self._mu = threading.Lock()

    @property
    def left(self):
        return self.limit - self._used

    def charge(self, nbytes):
        with self._mu:
            if self._used + nbytes > self.limit:
                return False
            self._used += nbytes
            return True

    def refund(self, nbytes):
        with self._mu:
            self._used = max(0, self._used - nbytes)


class ImageDecoder:
    def __init__(self, budget, codec):
        self.budget = budget
        self.codec = codec
        self._held = {}

    def thumbnail(self, blob, width, height):
        need = width * height * 4
        if not self.budget.charge(need):  # leak: no refund when the codec says no
            return None
        pixels = self.codec.decode(blob, width, height)
        if pixels is None:
            return None
        small = pixels[::4]
        self.budget.refund(need)
        return small

    def histogram(self, blob, width, height):
        need = width * height * 4
        if not self.budget.charge(need):  # clean: refunded in finally
            return {}
        try:
            return self.codec.count_colours(blob)
        finally:
            self.budget.refund(need)

    def keep(self, name, blob):
        if name not in self._held and self.budget.charge(len(blob)):  # clean: kept, refunded by drop
            self._held[name] = blob

    def drop(self, name):
        blob = self._held.pop(name)
        self.budget.refund(len(blob))


def probe(budget, reader, size):
    ok = budget.charge(size)  # leak: charged and never refunded
    if ok:
        head = reader.read(size)
        return head[:4] == b"\x89PNG"
    return False
