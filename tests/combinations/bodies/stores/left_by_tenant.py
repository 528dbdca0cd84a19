# CHARGE: self._left[key] -= X
# REFUND: self._left[key] += X
# SHORT: self._left[key] < X
# TRY: self.draw(key, X)
# UNDO: self.refund(key, X)
class Quotas:
    def __init__(self, quotas):
        self._left = dict(quotas)

    def draw(self, key, n):
        if self._left[key] < n:
            return False
        self._left[key] -= n
        return True

    def refund(self, key, n):
        self._left[key] += n
