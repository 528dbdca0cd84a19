# take: P.reserve(n)
# give: P.unreserve(n)
# gets: answer
class Pool:
    def __init__(self, tokens):
        self.tokens = tokens

    def reserve(self, n):
        if n > self.tokens:
            return False
        self.tokens -= n
        return True

    def reserve_up_to(self, n):
        granted = min(n, self.tokens)
        self.tokens -= granted
        return granted

    def unreserve(self, n):
        self.tokens += n
