# take: P.claim(key)
# give: P.vacate(key)
# gets: answer
class Pool:
    def __init__(self, most):
        self.most = most
        self.taken = set()

    def claim(self, name):
        if name in self.taken or len(self.taken) >= self.most:
            return False
        self.taken.add(name)
        return True

    def vacate(self, name):
        self.taken.remove(name)
