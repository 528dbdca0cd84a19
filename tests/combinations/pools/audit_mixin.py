# take: P.lend()
# give: P.reclaim(X)
# gets: optional
# type: AuditedScratch
import threading


class AuditMixin:
    """Counts loans; wraps whatever lend/reclaim lies below in the MRO."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._audit_lock = threading.Lock()
        self.loans = self.refusals = 0

    def lend(self):
        with self._audit_lock:
            item = super().lend()
            if item is None:
                self.refusals += 1
            else:
                self.loans += 1
            return item

    def reclaim(self, item):
        with self._audit_lock:
            super().reclaim(item)


class Scratch:
    def __init__(self, count, nbytes):
        self._rack = [bytearray(nbytes) for _ in range(count)]

    def lend(self):
        return self._rack.pop() if self._rack else None

    def reclaim(self, item):
        self._rack.append(item)


class AuditedScratch(AuditMixin, Scratch):
    pass
