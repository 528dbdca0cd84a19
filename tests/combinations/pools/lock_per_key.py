# take: P.lock_key(key)
# give: P.unlock_key(key)
# gets: nothing
import threading


class Pool:
    def __init__(self):
        self._mu = threading.Lock()
        self._locks = {}

    def _lock_for(self, key):
        with self._mu:
            return self._locks.setdefault(key, threading.Lock())

    def lock_key(self, key):
        self._lock_for(key).acquire()

    def unlock_key(self, key):
        self._lock_for(key).release()
