# take: P.try_hold(key)
# give: P.let_go(key)
# gets: answer
import threading


class Pool:
    def __init__(self, stripes):
        self._stripes = [threading.Lock() for _ in range(stripes)]

    def _stripe(self, key):
        return self._stripes[hash(key) % len(self._stripes)]

    def try_hold(self, key):
        return self._stripe(key).acquire(blocking=False)

    def let_go(self, key):
        self._stripe(key).release()
