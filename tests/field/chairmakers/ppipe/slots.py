"""Activation buffers with a use count, and credits for what may be on the wire."""
import threading
import time


class Act:
    def __init__(self, home, buf):
        self.home, self.buf = home, buf
        self.uses = 0
        self.mb = None

    def ref(self):
        self.uses += 1
        return self

    def unref(self):
        self.uses -= 1
        if self.uses == 0:
            self.home._back(self)


class ActPool:
    def __init__(self, n, make):
        self._all = [Act(self, make()) for _ in range(n)]
        self._ok = list(self._all)
        self._cv = threading.Condition()

    def borrow(self, mb):
        """Waits for a buffer. One use is counted for the borrower."""
        with self._cv:
            while not self._ok:
                self._cv.wait()
            act = self._ok.pop()  # clean: handed to the caller with one use
        act.mb, act.uses = mb, 1
        return act

    def _back(self, act):
        with self._cv:
            self._ok.append(act)
            self._cv.notify()


class Credits:
    """Counts bytes in units. take() is all or nothing, or so it says."""

    def __init__(self, n):
        self._sem = threading.Semaphore(n)

    def take(self, n, timeout):
        end = time.monotonic() + timeout
        for _ in range(n):
            if not self._sem.acquire(timeout=max(0.0, end - time.monotonic())):  # leak: running out of time in the middle returns False with the earlier units taken
                return False
        return True

    def take_one(self):
        return self._sem.acquire(blocking=False)  # clean: True means that the caller puts one

    def put(self, n=1):
        for _ in range(n):
            self._sem.release()
