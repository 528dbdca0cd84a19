# take: P.begin_save()
# give: P.finish_save()
# gets: answer
# type: AsyncSaveSlots
import threading


class AsyncSaveSlots:
    """Refuses a new async checkpoint while too many are still being written."""

    def __init__(self, max_pending=2):
        self._sem = threading.Semaphore(max_pending)
        self._lock = threading.Lock()
        self.skipped = 0
        self.pending = 0

    def _note(self, delta):
        with self._lock:
            self.pending += delta

    def begin_save(self):
        if not self._sem.acquire(blocking=False):
            with self._lock:
                self.skipped += 1
            return False
        self._note(+1)
        return True

    def finish_save(self):
        self._note(-1)
        self._sem.release()
