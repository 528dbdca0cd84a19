"""Admission control. A gate has a capacity in arbitrary units (we use estimated kilotokens)."""
import threading
import time

class Refused(Exception):
    """The gate stayed too full for too long."""

class Permit(object):
    """What a gate hands out. release() may be called once; shrink() gives a part back early."""

    def __init__(self, gate, weight):
        self._gate = gate
        self.weight = weight
        self.granted_at = time.monotonic()

    def shrink(self, weight):
        if weight < self.weight:
            self._gate._give(self.weight - weight)
            self.weight = weight

    def release(self):
        self._gate._give(self.weight)
        self.weight = 0

class Gate(object):
    def __init__(self, capacity):
        self.capacity = capacity
        self._used = 0
        self._condition = threading.Condition()

    def acquire(self, weight, timeout=10.0):
        """Wait for `weight` units. Raises Refused."""
        weight = min(weight, self.capacity)
        with self._condition:
            fits = self._condition.wait_for(
                lambda: self._used + weight <= self.capacity, timeout)
            if not fits:
                raise Refused("%d units within %.1fs" % (weight, timeout))
            self._used += weight
        return Permit(self, weight)

    def try_acquire(self, weight):
        try:
            return self.acquire(weight, timeout=0)  # clean: returned to the caller
        except Refused:
            return None

    def _give(self, weight):
        with self._condition:
            self._used -= weight
            self._condition.notify_all()
