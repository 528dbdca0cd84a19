# take: P.check_out()
# give: P.check_in(X)
# gets: optional
class Session:
    def __init__(self, number):
        self.number = number


class Pool:
    def __init__(self, limit):
        self.limit = limit
        self._out = {}
        self._count = 0

    def check_out(self):
        if len(self._out) >= self.limit:
            return None
        self._count += 1
        session = Session(self._count)
        self._out[session.number] = session
        return session

    def check_in(self, session):
        del self._out[session.number]
