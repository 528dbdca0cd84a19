# take: P.port()
# give: P.close_port(X)
# gets: optional
class Pool:
    def __init__(self, first, last):
        self.all = set(range(first, last))
        self.used = set()

    def port(self):
        left = self.all - self.used
        if not left:
            return None
        port = min(left)
        self.used.add(port)
        return port

    def close_port(self, port):
        self.used.discard(port)
