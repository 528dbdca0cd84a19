"""Counters at a turnstile: a numbered ticket is served in order and must be stamped out."""
import threading


class Turnstile:
    def __init__(self, desks):
        self._desks = desks
        self._issued = 0
        self._finished = 0
        self._early = set()
        self._cv = threading.Condition()

    def queue_up(self):
        with self._cv:
            number = self._issued
            self._issued += 1
            self._cv.wait_for(lambda: number < self._finished + self._desks)
            return number

    def stamp_out(self, number):
        with self._cv:
            self._early.add(number)
            while self._finished in self._early:
                self._early.remove(self._finished)
                self._finished += 1
            self._cv.notify_all()


class Applier:
    def __init__(self, turnstile, journal):
        self.turnstile = turnstile
        self.journal = journal

    def apply(self, op):
        number = self.turnstile.queue_up()  # clean: stamped out in finally
        try:
            self.journal.write(number, op)
        finally:
            self.turnstile.stamp_out(number)

    def apply_if(self, op, guard):
        number = self.turnstile.queue_up()  # leak: a false guard leaves the ticket open
        if not guard(op):
            return False
        self.journal.write(number, op)
        self.turnstile.stamp_out(number)
        return True

    def apply_batch(self, ops):
        number = self.turnstile.queue_up()  # clean: one ticket for the batch, stamped out
        for op in ops:
            self.journal.write(number, op)
        self.turnstile.stamp_out(number)


def next_number(turnstile):
    return turnstile.queue_up()  # clean: handed to the caller


def noop(turnstile, journal):
    number = next_number(turnstile)  # leak: never stamped out
    journal.write(number, "noop")
    return number
