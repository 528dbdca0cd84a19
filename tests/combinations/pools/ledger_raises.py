# take: P.commit(n)
# give: P.uncommit(n)
# gets: nothing
class Pool:
    def __init__(self, limit):
        self.limit = limit
        self.committed = 0
        self.lock = threading.Lock()

    def commit(self, nbytes):
        with self.lock:
            if self.committed + nbytes > self.limit:
                raise MemoryError(nbytes)
            self.committed += nbytes

    def uncommit(self, nbytes):
        with self.lock:
            self.committed -= nbytes
