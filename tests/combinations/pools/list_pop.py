# take: P.take()
# give: P.give(X)
# gets: optional
class Pool:
    def __init__(self, count):
        self._free = list(range(count))

    def take(self):
        if not self._free:
            return None
        return self._free.pop()

    def give(self, slot):
        self._free.append(slot)
