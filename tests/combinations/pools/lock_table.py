# take: P.enter(key)
# give: P.leave(key)
# gets: nothing
import threading
from collections import defaultdict


class Pool:
    def __init__(self):
        self._by_key = defaultdict(threading.Lock)

    def enter(self, key):
        lock = self._by_key[key]
        lock.acquire()

    def leave(self, key):
        self._by_key[key].release()
