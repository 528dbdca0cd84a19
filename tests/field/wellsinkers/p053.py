"""Worker lanes over two queues: idle ones wait in one, sick ones in the other."""
import queue
import threading


class Lane:
    def __init__(self, number):
        self.number = number
        self.inbox = queue.SimpleQueue()
        self.outbox = queue.SimpleQueue()
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self):
        while (task := self.inbox.get()) is not None:
            self.outbox.put(task())

    def do(self, task):
        self.inbox.put(task)
        return self.outbox.get()


class Lanes:
    def __init__(self, n):
        self._idle = queue.Queue()
        self._sick = queue.Queue()
        for i in range(n):
            self._idle.put(Lane(i))

    def get(self):
        return self._idle.get()

    def put(self, lane):
        self._idle.put(lane)

    def condemn(self, lane):
        lane.inbox.put(None)
        self._sick.put(lane)
        self._idle.put(Lane(lane.number))


def run(lanes, task):
    lane = lanes.get()  # clean: put back
    result = lane.do(task)
    lanes.put(lane)
    return result


def run_checked(lanes, task):
    lane = lanes.get()  # clean: put back or condemned
    result = lane.do(task)
    if result == "poisoned":
        lanes.condemn(lane)
        return None
    lanes.put(lane)
    return result


def run_until(lanes, tasks, stop):
    lane = lanes.get()  # leak: the stop value returns with the lane
    for task in tasks:
        result = lane.do(task)
        if result == stop:
            return result
    lanes.put(lane)
    return None


def lane_numbers(lanes, n):
    return [lanes.get().number for _ in range(n)]  # leak: only the numbers are kept
