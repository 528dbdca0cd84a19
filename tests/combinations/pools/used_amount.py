# take: P.charge(n)
# give: P.uncharge(n)
# gets: answer
class Pool:
    def __init__(self, limit):
        self.limit = limit
        self.used = 0

    def charge(self, nbytes):
        if self.used + nbytes > self.limit:
            return False
        self.used += nbytes
        return True

    def uncharge(self, nbytes):
        self.used -= nbytes
