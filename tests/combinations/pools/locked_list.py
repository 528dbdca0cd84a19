# take: P.acquire_slot()
# give: P.release_slot(X)
# gets: optional
import threading


class Pool:
    def __init__(self, count):
        self._lock = threading.Lock()
        self._free = list(range(count))
        self._used = set()

    def acquire_slot(self):
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self._used.add(slot)
            return slot

    def release_slot(self, slot):
        with self._lock:
            self._used.discard(slot)
            self._free.append(slot)
