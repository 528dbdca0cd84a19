# take: P.try_admit(n)
# give: P.retire(n)
# gets: answer
class Pool:
    def __init__(self, tokens, seats):
        self.tokens = tokens
        self.seats = seats

    def try_admit(self, tokens):
        if self.seats == 0 or tokens > self.tokens:
            return False
        self.seats -= 1
        self.tokens -= tokens
        return True

    def retire(self, tokens):
        self.seats += 1
        self.tokens += tokens
