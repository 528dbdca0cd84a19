# take: P.reserve(n)
# give: P.refund(n)
# gets: answer
class Pool:
    def __init__(self, capacity):
        self._available = capacity

    def reserve(self, tokens):
        if tokens > self._available:
            return False
        self._available -= tokens
        return True

    def refund(self, tokens):
        self._available += tokens
