# take: P.rent()
# give: P.unrent(X)
# gets: optional
class Pool:
    def __init__(self, things):
        self._things = deque(things)
        self._sem = threading.Semaphore(len(self._things))

    def rent(self):
        if not self._sem.acquire(timeout=1.0):
            return None
        return self._things.popleft()

    def unrent(self, thing):
        self._things.append(thing)
        self._sem.release()
