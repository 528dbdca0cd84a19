"""Outbound call limiter of a price feed."""
import threading
import time


class CallBudget:
    """Permits are anonymous: granted by a true result, refunded by refund()."""

    def __init__(self, limit):
        self._left = limit
        self._mutex = threading.Lock()

    def try_grant(self):
        with self._mutex:
            if self._left == 0:
                return False
            self._left -= 1
            return True

    def refund(self):
        with self._mutex:
            self._left += 1


class FeedClient:
    def __init__(self, budget, transport, stale_after=5.0):
        self.budget = budget
        self.transport = transport
        self.stale_after = stale_after
        self.cache = {}

    def _admitted(self, patience):
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if self.budget.try_grant():  # clean: a true result hands the permit to the caller
                return True
            time.sleep(0.01)
        return False

    def snapshot(self, symbol):
        if not self._admitted(0.5):  # clean: refunded in finally
            return self.cache.get(symbol)
        try:
            quote = self.transport.get(symbol)
            self.cache[symbol] = (time.monotonic(), quote)
            return quote
        finally:
            self.budget.refund()

    def refresh(self, symbol):
        if not self._admitted(0.1):  # leak: a fresh cache entry returns with the permit taken
            return None
        stamp, quote = self.cache.get(symbol, (0.0, None))
        if time.monotonic() - stamp < self.stale_after:
            return quote
        quote = self.transport.get(symbol)
        self.cache[symbol] = (time.monotonic(), quote)
        self.budget.refund()
        return quote

    def ping(self):
        ok = self.budget.try_grant()  # clean: refunded if it was granted
        if ok:
            self.transport.ping()
            self.budget.refund()
        return ok

    def status(self):
        free = self.budget.try_grant()  # leak: tested for its truth only
        return {"congested": not free, "cached": len(self.cache)}
