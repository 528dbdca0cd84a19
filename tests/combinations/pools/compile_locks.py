# take: P.try_lock(key)
# give: P.unlock(key)
# gets: answer
# type: CompileLocks
import threading
import time


class CompileLocks:
    """Advisory: one autotuner per kernel name, everybody else falls back to the default config."""

    def __init__(self, clock=time.monotonic):
        self._since = {}
        self._clock = clock
        self._m = threading.Lock()

    def try_lock(self, name):
        with self._m:
            if name in self._since:
                return False
            self._since[name] = self._clock()
            return True

    def unlock(self, name):
        with self._m:
            del self._since[name]

    def stuck(self, longer_than):
        with self._m:
            return [k for k, t in self._since.items() if self._clock() - t > longer_than]
