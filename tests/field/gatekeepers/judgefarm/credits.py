"""A purse of credits. A draw is settled: what was not used flows back."""
import logging
import threading

logger = logging.getLogger("judgefarm.credits")


class Bankrupt(Exception):
    pass


class Draw:
    def __init__(self, purse, amount, memo):
        self.purse = purse
        self.amount = amount
        self.memo = memo
        self.settled = False

    def settle(self):
        if self.settled:
            return
        self.settled = True
        self.purse._refund(self.amount)

    def split(self, amount):
        """Moves a part of this draw into a new one."""
        amount = min(amount, self.amount)
        self.amount -= amount
        return Draw(self.purse, amount, self.memo + "/part")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.settle()


class Purse:
    def __init__(self, total, reserve=0):
        self.total = total
        self.reserve = reserve
        self._left = total
        self._cond = threading.Condition()
        self.closed = False

    def draw(self, amount, memo="", timeout=None):
        with self._cond:
            ok = self._cond.wait_for(lambda: self.closed or self._left - amount >= self.reserve, timeout)
            if not ok or self.closed:
                raise Bankrupt(f"{memo}: {amount} of {self._left}")
            self._left -= amount  # clean: the draw is returned and refunds in settle()
        return Draw(self, amount, memo)

    def draw_urgent(self, amount, memo=""):
        """May eat into the reserve."""
        with self._cond:
            if self._left < amount:
                return None
            self._left -= amount  # leak: a closed purse raises after the amount was taken off
            if self.closed:
                raise Bankrupt("closed")
        return Draw(self, amount, memo)

    def _refund(self, amount):
        with self._cond:
            self._left += amount
            self._cond.notify_all()

    def close(self):
        with self._cond:
            self.closed = True
            self._cond.notify_all()
