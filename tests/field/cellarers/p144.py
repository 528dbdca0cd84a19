"""Timer wheel with a fixed number of timers."""
import itertools


class TimerWheel:
    def __init__(self, slots=256, limit=1000):
        self.slots = [dict() for _ in range(slots)]
        self.where = {}
        self.limit = limit
        self.now = 0
        self._ids = itertools.count()

    def arm(self, ticks, callback):
        if len(self.where) >= self.limit:
            raise RuntimeError("timer wheel is full")
        tid = next(self._ids)
        slot = (self.now + ticks) % len(self.slots)
        self.slots[slot][tid] = (callback, ticks)
        self.where[tid] = slot
        return tid

    def disarm(self, tid):
        slot = self.where.pop(tid, None)
        if slot is not None:
            del self.slots[slot][tid]

    def tick(self):
        self.now += 1
        for callback, _ in self.slots[self.now % len(self.slots)].values():
            callback()


class Peer:
    def __init__(self, wheel, link):
        self.wheel = wheel
        self.link = link
        self.keepalive = None

    def up(self):
        self.keepalive = self.wheel.arm(30, self.link.ping)  # clean: kept, disarmed by down()

    def down(self):
        self.wheel.disarm(self.keepalive)

    def request(self, message):
        tid = self.wheel.arm(5, self.link.abort)  # clean: disarmed in finally
        try:
            return self.link.call(message)
        finally:
            self.wheel.disarm(tid)

    def handshake(self, version):
        tid = self.wheel.arm(10, self.link.abort)  # leak: a version mismatch returns with the timer armed
        reply = self.link.call(b"HELLO")
        if reply[0] != version:
            return False
        self.wheel.disarm(tid)
        return True

    def retry(self, message, times):
        tid = None
        for n in range(times):
            tid = self.wheel.arm(2 << n, self.link.abort)  # leak: each turn overwrites the timer of the last
            if self.link.call(message):
                break
        if tid is not None:
            self.wheel.disarm(tid)
