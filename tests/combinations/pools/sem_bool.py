# take: P.begin()
# give: P.finish()
# gets: answer
import threading


class Pool:
    def __init__(self, n):
        self._sem = threading.BoundedSemaphore(n)

    def begin(self):
        return self._sem.acquire(blocking=False)

    def finish(self):
        self._sem.release()
