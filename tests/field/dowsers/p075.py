"""Copy engines shared by load: a lease is a NamedTuple with engine and bytes."""
from typing import NamedTuple


class Booking(NamedTuple):
    engine: int
    nbytes: int


class CopyEngines:
    def __init__(self, n, queue_limit):
        self.load = [0] * n
        self.limit = queue_limit

    def book(self, nbytes):
        engine = min(range(len(self.load)), key=self.load.__getitem__)
        if self.load[engine] + nbytes > self.limit:
            return None
        self.load[engine] += nbytes
        return Booking(engine, nbytes)

    def unbook(self, booking):
        self.load[booking.engine] -= booking.nbytes


class Mover:
    def __init__(self, engines: CopyEngines, hw):
        self.engines = engines
        self.hw = hw
        self.outstanding = {}

    def move(self, src, dst):
        b = self.engines.book(src.nbytes)  # clean: unbooked in finally
        if b is None:
            return False
        try:
            self.hw.copy_on(b.engine, src, dst)
            return True
        finally:
            self.engines.unbook(b)

    def submit(self, tag, src, dst):
        b = self.engines.book(src.nbytes)  # clean: kept in outstanding, complete() unbooks
        if b is None:
            return False
        self.outstanding[tag] = b
        self.hw.copy_async(b.engine, src, dst, tag)
        return True

    def complete(self, tag):
        self.engines.unbook(self.outstanding.pop(tag))

    def submit_all(self, pairs):
        for tag, (src, dst) in pairs.items():
            b = self.engines.book(src.nbytes)  # leak: a refused copy continues with its booking
            if b is None:
                break
            if not self.hw.try_copy(b.engine, src, dst, tag):
                continue
            self.outstanding[tag] = b

    def best_engine(self, nbytes):
        b = self.engines.book(nbytes)  # leak: only the number of the engine is returned
        if b is None:
            return -1
        return b.engine
