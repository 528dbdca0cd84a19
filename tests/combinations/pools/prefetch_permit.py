# take: P.may_prefetch()
# give: P.prefetched()
# gets: answer
# type: PrefetchThrottle
import threading


class PrefetchThrottle(object):

    def __init__(self, width):
        self._permits = threading.Semaphore(width)
        self.denied = 0

    def may_prefetch(self):
        """Never blocks: prefetching is optional, so a denied layer is fetched on demand."""
        ok = self._permits.acquire(blocking=False)
        if not ok:
            self.denied += 1
        return ok

    def prefetched(self):
        self._permits.release()
