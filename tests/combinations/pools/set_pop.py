# take: P.obtain()
# give: P.surrender(X)
# gets: optional
class Pool:
    def __init__(self, count):
        self.unused = set(range(count))

    def obtain(self):
        if not self.unused:
            return None
        return self.unused.pop()

    def surrender(self, port):
        self.unused.add(port)
