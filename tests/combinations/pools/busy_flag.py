# take: P.reserve()
# give: P.free(X)
# gets: optional
class Worker:
    def __init__(self):
        self.busy = False


class Pool:
    def __init__(self, count):
        self.workers = [Worker() for _ in range(count)]

    def reserve(self):
        for worker in self.workers:
            if not worker.busy:
                worker.busy = True
                return worker
        return None

    def free(self, worker):
        worker.busy = False
