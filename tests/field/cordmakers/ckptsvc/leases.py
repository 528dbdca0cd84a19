"""Two kinds of leases: upload slots and job leases on a step."""
import heapq
import threading
import time


class UploadSlots:
    """Numbered slots; the smallest free number is given first."""

    def __init__(self, n):
        self._free = list(range(n))
        self._cv = threading.Condition()

    def book(self, timeout=None):
        with self._cv:
            if not self._cv.wait_for(lambda: self._free, timeout):
                return None
            return heapq.heappop(self._free)  # clean: returned to the caller

    def book_even(self):
        """A slot of the even half, which has the fast disks."""
        with self._cv:
            skipped = []
            found = None
            while self._free and found is None:
                slot = heapq.heappop(self._free)  # clean: near miss, odd ones are collected and pushed again
                if slot % 2:
                    skipped.append(slot)
                else:
                    found = slot
            for slot in skipped:
                heapq.heappush(self._free, slot)
            return found

    def unbook(self, slot):
        with self._cv:
            heapq.heappush(self._free, slot)
            self._cv.notify()


class Lease:
    def __init__(self, job, step, deadline):
        self.job = job
        self.step = step
        self.deadline = deadline
        self.slots = []

    def expired(self):
        return time.monotonic() > self.deadline


class LeaseBoard:
    """At most `limit` leases at a time; a lease also holds its slots."""

    def __init__(self, slots, limit, ttl=600.0):
        self.slots = slots
        self.limit = limit
        self.ttl = ttl
        self.active = {}

    def open_lease(self, job, step, n):
        if len(self.active) >= self.limit or (job, step) in self.active:
            return None
        lease = Lease(job, step, time.monotonic() + self.ttl)
        for _ in range(n):
            slot = self.slots.book(timeout=1.0)  # leak: the slots booked so far are lost when one is missing
            if slot is None:
                return None
            lease.slots.append(slot)
        self.active[(job, step)] = lease
        return lease

    def widen(self, lease, n):
        for _ in range(n):
            slot = self.slots.book(timeout=0.1)  # clean: appended to lease.slots unless None, end_lease() unbooks
            if slot is None:
                return False
            lease.slots.append(slot)
        return True

    def end_lease(self, lease):
        del self.active[(lease.job, lease.step)]
        while lease.slots:
            self.slots.unbook(lease.slots.pop())

    def sweep(self):
        for lease in [x for x in self.active.values() if x.expired()]:
            self.end_lease(lease)
