# take: P.grab()
# give: P.drop(X)
# gets: optional
class Pool:
    def __init__(self, count):
        self.used = [False] * count

    def grab(self):
        for i, used in enumerate(self.used):
            if not used:
                self.used[i] = True
                return i
        return None

    def drop(self, i):
        self.used[i] = False
