# take: P.acquire(1.0)
# give: P.release(X)
# gets: optional
import threading


class Pool:
    def __init__(self, items):
        self._items = list(items)
        self._cond = threading.Condition()

    def acquire(self, timeout=None):
        with self._cond:
            while not self._items:
                if not self._cond.wait(timeout):
                    return None
            return self._items.pop()

    def release(self, item):
        with self._cond:
            self._items.append(item)
            self._cond.notify()
