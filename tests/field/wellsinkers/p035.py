"""Timers of an event loop: a fixed number of cells on a wheel, armed and disarmed."""
import heapq


class TimerWheel:
    def __init__(self, cells):
        self.deadline = [None] * cells
        self.free = list(range(cells))
        self.heap = []

    def arm(self, when):
        if not self.free:
            return None
        cell = heapq.heappop(self.free)
        self.deadline[cell] = when
        heapq.heappush(self.heap, (when, cell))
        return cell

    def disarm(self, cell):
        self.deadline[cell] = None
        heapq.heappush(self.free, cell)

    def expired(self, now):
        while self.heap and self.heap[0][0] <= now:
            when, cell = heapq.heappop(self.heap)
            if self.deadline[cell] == when:
                yield cell


class Caller:
    def __init__(self, wheel, transport, clock):
        self.wheel = wheel
        self.transport = transport
        self.clock = clock
        self.cells = {}

    def call(self, request):
        cell = self.wheel.arm(self.clock() + 5.0)  # clean: disarmed by on_reply
        self.cells[request.id] = cell
        self.transport.send(request)

    def on_reply(self, request_id):
        cell = self.cells.pop(request_id)
        if cell is not None:
            self.wheel.disarm(cell)

    def call_sync(self, request):
        cell = self.wheel.arm(self.clock() + 1.0)  # leak: armed still when the send is refused
        if cell is None:
            return None
        if not self.transport.send(request):
            return None
        reply = self.transport.recv(request.id)
        self.wheel.disarm(cell)
        return reply


def measure(wheel, clock, work):
    cell = wheel.arm(clock() + 60.0)  # clean: disarmed in finally
    if cell is None:
        return work()
    try:
        return work()
    finally:
        wheel.disarm(cell)
