import threading
from multiprocessing import shared_memory


class SegmentDepot:
    """Shared memory segments that are made once and go round."""

    def __init__(self, count, size):
        self._mutex = threading.Lock()
        self._segments = [shared_memory.SharedMemory(create=True, size=size) for _ in range(count)]

    def fetch_segment(self):
        with self._mutex:
            return self._segments.pop()

    def restore_segment(self, segment):
        with self._mutex:
            self._segments.append(segment)


class WorkerState:
    def __init__(self, wid, segment):
        self.wid = wid
        self.segment = segment
        self.restarts = 0
        self.result = None


class DataWorkers:
    def __init__(self, depot, count, spawn):
        self.depot = depot
        self.spawn = spawn
        self.states = []
        for wid in range(count):
            segment = depot.fetch_segment()  # leak: restart makes a new state for a dead worker
            self.states.append(WorkerState(wid, segment))
        self.index = depot.fetch_segment()  # clean: close restores it

    def check(self):
        restarted = 0
        for at, state in enumerate(self.states):
            if self.spawn(state.wid, state.segment.name) is None:
                self.restart(at)
                restarted += 1
        return restarted

    def restart(self, at):
        old = self.states[at]
        fresh = WorkerState(old.wid, self.depot.fetch_segment())  # leak: the next restart replaces the state
        fresh.restarts = old.restarts + 1
        self.states[at] = fresh

    def collect(self, merge):
        for state in self.states:
            state.result = bytes(state.segment.buf[:16])
        return merge([s.result for s in self.states])

    def shuffle(self, order):
        segment = self.depot.fetch_segment()  # clean: restored below
        for i, n in enumerate(order):
            segment.buf[i] = n % 256
        self.index.buf[:len(order)] = segment.buf[:len(order)]
        self.depot.restore_segment(segment)

    def close(self):
        while self.states:
            self.depot.restore_segment(self.states.pop().segment)
        self.depot.restore_segment(self.index)
