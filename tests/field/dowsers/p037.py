"""Fair turnstile for the single PCIe root: take a ticket, wait, finish."""
import threading


class Turnstile:
    def __init__(self):
        self._cv = threading.Condition()
        self._next = 0
        self._serving = 0

    def queue_up(self):
        with self._cv:
            ticket = self._next
            self._next += 1
            while self._serving != ticket:
                self._cv.wait()
            return ticket

    def pass_on(self, ticket):
        with self._cv:
            self._serving = ticket + 1
            self._cv.notify_all()


class PcieLink:
    def __init__(self, turnstile: Turnstile, dma):
        self.turnstile = turnstile
        self.dma = dma

    def h2d(self, src, dst):
        ticket = self.turnstile.queue_up()  # clean: passed on in finally
        try:
            self.dma.copy(src, dst)
        finally:
            self.turnstile.pass_on(ticket)

    def d2h(self, src, dst):
        ticket = self.turnstile.queue_up()  # leak: a short destination returns without passing on
        if dst.nbytes < src.nbytes:
            return -1
        n = self.dma.copy(src, dst)
        self.turnstile.pass_on(ticket)
        return n

    def poll(self, flag):
        ticket = self.turnstile.queue_up()  # clean: passed on before the return
        value = self.dma.peek(flag)
        self.turnstile.pass_on(ticket)
        return value

    def batch(self, copies):
        for src, dst in copies:
            ticket = self.turnstile.queue_up()  # leak: continue on equal addresses holds the turnstile
            if src.addr == dst.addr:
                continue
            self.dma.copy(src, dst)
            self.turnstile.pass_on(ticket)

    def exclusive(self, fn):
        ticket = self.turnstile.queue_up()  # clean: finally
        try:
            return fn(self.dma)
        finally:
            self.turnstile.pass_on(ticket)
