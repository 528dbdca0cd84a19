"""Telescope time: intervals booked on an instrument, and struck out again."""
import heapq
import itertools


class Booking:
    _numbers = itertools.count(1)

    def __init__(self, plan, start, stop):
        self.number = next(self._numbers)
        self.plan, self.start, self.stop = plan, start, stop

    def __lt__(self, other):
        return self.start < other.start

    def strike(self):
        self.plan._strike(self)


class Plan:
    def __init__(self):
        self._booked = []

    def _strike(self, booking):
        self._booked = [b for b in self._booked if b.number != booking.number]
        heapq.heapify(self._booked)

    def clashes(self, start, stop):
        return any(b.start < stop and start < b.stop for b in self._booked)

    def book(self, start, stop):
        if self.clashes(start, stop):
            return None
        booking = Booking(self, start, stop)
        heapq.heappush(self._booked, booking)
        return booking


class Observer:
    def __init__(self, plan, dome):
        self.plan = plan
        self.dome = dome
        self.nights = []

    def request(self, start, stop):
        booking = self.plan.book(start, stop)  # clean: kept in nights, struck by withdraw
        if booking is not None:
            self.nights.append(booking)

    def withdraw(self):
        while self.nights:
            self.nights.pop().strike()

    def calibrate(self, now):
        booking = self.plan.book(now, now + 10)  # leak: a shut dome keeps the interval
        if booking is None or self.dome.shut:
            return None
        flat = self.dome.flat_field()
        booking.strike()
        return flat


def longest_gap(plan, start, lengths):
    best = 0
    for n in lengths:
        booking = plan.book(start, start + n)  # clean: struck on each turn
        if booking is not None:
            best = n
            booking.strike()
    return best
