# take: P.reserve_up_to(n)
# give: P.refund(X)
# gets: value
class Pool:
    def __init__(self, tokens):
        self.most = tokens
        self._left = tokens

    def reserve(self, n):
        if n > self._left:
            return False
        self._left -= n
        return True

    def reserve_up_to(self, n):
        granted = min(n, self._left)
        self._left -= granted
        return granted

    def refund(self, n):
        self._left = min(self.most, self._left + n)
