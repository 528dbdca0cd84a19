"""Ring of staging bytes for all-reduce; space is retired in the order it was taken."""
from collections import deque


class StagingRing:
    def __init__(self, size):
        self.size = size
        self.head = 0
        self.tail = 0
        self._pending = deque()
        self._done = set()

    @property
    def used(self):
        return self.head - self.tail

    def advance(self, nbytes):
        if self.used + nbytes > self.size:
            return None
        mark = self.head
        self.head += nbytes
        self._pending.append((mark, nbytes))
        return mark

    def retire(self, mark):
        self._done.add(mark)
        while self._pending and self._pending[0][0] in self._done:
            first, nbytes = self._pending.popleft()
            self._done.discard(first)
            self.tail = first + nbytes


class RingReducer:
    def __init__(self, ring: StagingRing, link):
        self.ring = ring
        self.link = link
        self.in_flight = {}

    def reduce_now(self, grad):
        mark = self.ring.advance(grad.nbytes)  # clean: retired in finally
        if mark is None:
            return self.link.reduce_direct(grad)
        try:
            return self.link.reduce(grad, mark % self.ring.size)
        finally:
            self.ring.retire(mark)

    def post(self, grad):
        mark = self.ring.advance(grad.nbytes)  # clean: kept in in_flight, on_done() retires it
        if mark is None:
            return False
        self.in_flight[grad.name] = mark
        self.link.post(grad, mark % self.ring.size)
        return True

    def on_done(self, name):
        self.ring.retire(self.in_flight.pop(name))

    def broadcast(self, tensor, peers):
        mark = self.ring.advance(tensor.nbytes)  # leak: with no peers it returns before retire
        if mark is None or not peers:
            return 0
        for p in peers:
            self.link.send(p, tensor, mark)
        self.ring.retire(mark)
        return len(peers)

    def pad(self, nbytes):
        self.ring.advance(-nbytes % 256)  # leak: the mark is thrown away, the tail can never pass it
        return self.ring.used
