# take: P.checkout()
# give: P.checkin(X)
# gets: value
from collections import OrderedDict


class Conn:
    def __init__(self, number):
        self.number = number


class Pool:
    def __init__(self):
        self._idle = OrderedDict()
        self._made = 0

    def checkout(self):
        if self._idle:
            _, conn = self._idle.popitem(last=True)
            return conn
        self._made += 1
        return Conn(self._made)

    def checkin(self, conn):
        self._idle[conn.number] = conn
