# take: P.draw(n)
# give: P.repay(X)
# gets: value
class Pool:
    def __init__(self, capacity):
        self.capacity = capacity
        self._left = capacity

    def draw(self, tokens):
        granted = min(tokens, self._left)
        self._left -= granted
        return granted

    def repay(self, tokens):
        self._left += tokens
