# TRY: self._sem.acquire(blocking=False)
# UNDO: self._sem.release()
import threading


class Gate:
    def __init__(self, width):
        self._sem = threading.Semaphore(width)

    def enter(self):
        return self._sem.acquire(timeout=1.0)

    def leave(self):
        self._sem.release()
