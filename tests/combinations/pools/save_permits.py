# take: P.enter_gate()
# give: P.exit_gate()
# gets: nothing
# type: SaveGate
import threading
import time


class SaveGate:
    """At most `width` checkpoint shards are written to the parallel filesystem at once."""

    def __init__(self, width=4):
        self._sem = threading.BoundedSemaphore(width)
        self._stat_lock = threading.Lock()
        self.waited_s = 0.0

    def enter_gate(self):
        t0 = time.perf_counter()
        self._sem.acquire()
        with self._stat_lock:
            self.waited_s += time.perf_counter() - t0

    def exit_gate(self):
        self._sem.release()
