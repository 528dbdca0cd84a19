# take: P.enter_prefill()
# give: P.leave_prefill()
# gets: nothing
# type: PrefillLimiter
import threading


class PrefillLimiter:
    def __init__(self, max_concurrent):
        self._sem = threading.BoundedSemaphore(max_concurrent)
        self._count_lock = threading.Lock()
        self.running = 0
        self.peak_running = 0

    def enter_prefill(self):
        self._sem.acquire()
        with self._count_lock:
            self.running += 1
            if self.running > self.peak_running:
                self.peak_running = self.running

    def leave_prefill(self):
        with self._count_lock:
            self.running -= 1
        self._sem.release()
