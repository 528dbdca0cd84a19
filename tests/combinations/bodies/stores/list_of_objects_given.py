# TAKE: X = self._workers.pop(0)
# PUT: self._workers.append(X)
# EMPTY: not self._workers
# COUNT: len(self._workers)
# BAD: X.lag > n
class WorkerPool:
    """Lends the workers that it is given."""

    def __init__(self, workers):
        self._workers = list(workers)

    def borrow(self):
        if not self._workers:
            raise LookupError("all workers are out")
        return self._workers.pop(0)

    def give_back(self, worker):
        self._workers.append(worker)
