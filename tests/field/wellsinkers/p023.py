"""Read/write lock over a table, readers counted."""
import threading


class SharedLatch:
    def __init__(self):
        self._cv = threading.Condition()
        self._readers = 0
        self._writer = None

    def lock_shared(self):
        with self._cv:
            while self._writer is not None:
                self._cv.wait()
            self._readers += 1

    def unlock_shared(self):
        with self._cv:
            self._readers -= 1
            if not self._readers:
                self._cv.notify_all()

    def lock_exclusive(self):
        with self._cv:
            while self._writer is not None or self._readers:
                self._cv.wait()
            self._writer = threading.get_ident()

    def unlock_exclusive(self):
        with self._cv:
            self._writer = None
            self._cv.notify_all()


class Catalog:
    def __init__(self):
        self.latch = SharedLatch()
        self.rows = {}

    def get(self, key):
        self.latch.lock_shared()  # leak: a missing key returns under the lock
        if key not in self.rows:
            return None
        row = dict(self.rows[key])
        self.latch.unlock_shared()
        return row

    def size(self):
        self.latch.lock_shared()  # clean: unlocked in finally
        try:
            return len(self.rows)
        finally:
            self.latch.unlock_shared()

    def put(self, key, row):
        self.latch.lock_exclusive()  # clean: unlocked at the end
        self.rows[key] = row
        self.latch.unlock_exclusive()

    def put_new(self, key, row):
        self.latch.lock_exclusive()  # leak: unlocked only when the key was new
        if key not in self.rows:
            self.rows[key] = row
            self.latch.unlock_exclusive()
            return True
        return False
