# take: P.try_enter()
# give: P.leave()
# gets: answer
class Pool:
    def __init__(self, limit):
        self.limit = limit
        self.inflight = 0

    def try_enter(self):
        if self.inflight >= self.limit:
            return False
        self.inflight += 1
        return True

    def leave(self):
        self.inflight -= 1
