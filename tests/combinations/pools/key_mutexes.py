# take: P.hold(key)
# give: P.drop(key)
# gets: nothing
# type: KeyedMutex
import threading


class KeyedMutex:
    """
    One mutex per model name, so that two requests never download the same weights.
    Entries vanish when nobody holds or waits for them.
    """

    def __init__(self):
        self._guard = threading.Lock()
        self._entries = {}  # key -> [mutex, interested]

    def hold(self, key):
        with self._guard:
            entry = self._entries.setdefault(key, [threading.Lock(), 0])
            entry[1] += 1
        entry[0].acquire()

    def drop(self, key):
        with self._guard:
            entry = self._entries[key]
            entry[0].release()
            entry[1] -= 1
            if not entry[1]:
                del self._entries[key]
