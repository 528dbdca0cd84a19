# take: P.next_worker()
# give: P.worker_done(X)
# gets: optional
from enum import Enum


class State(Enum):
    IDLE = 0
    BUSY = 1


class Worker:
    def __init__(self, rank):
        self.rank = rank
        self.state = State.IDLE


class Pool:
    def __init__(self, count):
        self.workers = [Worker(rank) for rank in range(count)]

    def next_worker(self):
        for worker in self.workers:
            if worker.state is State.IDLE:
                worker.state = State.BUSY
                return worker
        return None

    def worker_done(self, worker):
        worker.state = State.IDLE
