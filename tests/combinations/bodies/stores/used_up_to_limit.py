# CHARGE: self._used += X
# REFUND: self._used -= X
# SHORT: self._used + X > self.limit
# TRY: self.reserve(X)
# UNDO: self.unreserve(X)
class Ledger:
    def __init__(self, limit):
        self.limit = limit
        self._used = 0

    def reserve(self, nbytes):
        if self._used + nbytes > self.limit:
            return False
        self._used += nbytes
        return True

    def unreserve(self, nbytes):
        self._used -= nbytes
