"""Object cache with a magazine per thread in front of a shared depot."""
import threading

ROUNDS = 8


class Depot:
    def __init__(self, make):
        self.make = make
        self.full = []
        self.lock = threading.Lock()

    def swap_in(self):
        with self.lock:
            if self.full:
                return self.full.pop()
        return [self.make() for _ in range(ROUNDS)]

    def swap_out(self, magazine):
        with self.lock:
            self.full.append(magazine)


class MagazineCache:
    def __init__(self, depot):
        self.depot = depot
        self.local = threading.local()

    @property
    def _mag(self):
        if not hasattr(self.local, "mag"):
            self.local.mag = []
        return self.local.mag

    def draw(self):
        if not self._mag:
            self.local.mag = self.depot.swap_in()
        return self._mag.pop()

    def load(self, obj):
        if len(self._mag) >= 2 * ROUNDS:
            self.depot.swap_out(self._mag[:ROUNDS])
            del self._mag[:ROUNDS]
        self._mag.append(obj)


def encode(cache, record):
    buf = cache.draw()  # clean: loaded back in finally
    try:
        buf.write(repr(record).encode())
        return buf.getvalue()
    finally:
        buf.seek(0)
        cache.load(buf)


def encode_all(cache, records, out):
    for record in records:
        buf = cache.draw()  # leak: empty records continue with the buffer drawn
        if not record:
            continue
        buf.write(repr(record).encode())
        out.append(buf.getvalue())
        cache.load(buf)


def is_small(cache, record, limit):
    buf = cache.draw()  # leak: used for the measurement and then lost
    n = buf.write(repr(record).encode())
    return n <= limit
