# TRY: self._locks[X].acquire(blocking=False)
# UNDO: self._locks[X].release()
import threading


class Stripes:
    def __init__(self, count):
        self._locks = [threading.Lock() for _ in range(count)]

    def try_lock(self, i):
        return self._locks[i].acquire(blocking=False)

    def unlock(self, i):
        self._locks[i].release()
