# take: P.connection()
# give: P.done_with(X)
# gets: optional
class Connection:
    def __init__(self):
        self.broken = False


class Pool:
    def __init__(self, most):
        self.most = most
        self._made = 0
        self._waiting = []

    def connection(self):
        if self._waiting:
            return self._waiting.pop()
        if self._made < self.most:
            self._made += 1
            return Connection()
        return None

    def done_with(self, connection):
        if connection.broken:
            self._made -= 1
            return
        self._waiting.append(connection)
