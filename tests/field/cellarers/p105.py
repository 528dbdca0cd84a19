"""Bytes in flight towards the storage node are held under a budget."""
import threading


class ByteBudget:
    def __init__(self, total):
        self.total = total
        self._used = 0
        self._cond = threading.Condition()

    @property
    def left(self):
        return self.total - self._used

    def charge(self, n):
        with self._cond:
            self._cond.wait_for(lambda: self.left >= n)
            self._used += n

    def refund(self, n):
        with self._cond:
            self._used -= n
            self._cond.notify_all()


class Replicator:
    def __init__(self, budget, peer):
        self.budget = budget
        self.peer = peer

    def ship(self, block):
        size = len(block)
        self.budget.charge(size)  # clean: refunded in finally
        try:
            self.peer.send(block)
        finally:
            self.budget.refund(size)

    def ship_if_newer(self, block, version):
        self.budget.charge(len(block))  # leak: an up-to-date peer returns with the bytes charged
        if self.peer.version() >= version:
            return False
        self.peer.send(block)
        self.budget.refund(len(block))
        return True

    def ship_all(self, blocks):
        total = sum(len(b) for b in blocks)
        self.budget.charge(total)  # clean: refunded piece by piece, the sum is the same
        for block in blocks:
            self.peer.send(block)
            self.budget.refund(len(block))

    def ship_header(self, header, body):
        self.budget.charge(len(header))  # leak: only the body's bytes are refunded
        self.budget.charge(len(body))  # clean: refunded after sending
        self.peer.send(header + body)
        self.budget.refund(len(body))
