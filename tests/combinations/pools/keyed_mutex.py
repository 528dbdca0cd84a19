# take: P.enter(key)
# give: P.leave(key)
# gets: nothing
# type: PerModelMutex
import threading


class PerModelMutex:
    """One mutex per model name, dropped once nobody waits for it."""

    def __init__(self):
        self._table_lock = threading.Lock()
        self._table = {}
        self.contended = 0

    def enter(self, name):
        with self._table_lock:
            entry = self._table.get(name)
            if entry is None:
                entry = self._table[name] = [threading.Lock(), 0]
            elif entry[1]:
                self.contended += 1
            entry[1] += 1
        entry[0].acquire()

    def leave(self, name):
        with self._table_lock:
            entry = self._table[name]
            entry[1] -= 1
            if entry[1] == 0:
                del self._table[name]
        entry[0].release()
