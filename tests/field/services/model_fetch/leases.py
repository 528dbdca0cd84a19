"""Download permits and lock files."""
import os
import threading
import time


class Permits(object):
    """Counted bandwidth permits. acquire_permits(n) gives True or False."""

    def __init__(self, total):
        self.total = total
        self.left = total
        self._cv = threading.Condition()

    def acquire_permits(self, n, wait=0.0):
        end = time.time() + wait
        with self._cv:
            while self.left < n:
                if time.time() >= end:
                    return False
                self._cv.wait(0.05)
            self.left -= n
            return True

    def release_permits(self, n):
        with self._cv:
            self.left += n
            self._cv.notify_all()


class PathLocks(object):
    def __init__(self):
        self._held = set()
        self._mu = threading.Lock()

    def lock_path(self, path):
        path = os.path.abspath(path)
        with self._mu:
            if path in self._held:
                return None
            self._held.add(path)
            return path

    def unlock_path(self, token):
        with self._mu:
            self._held.remove(token)
