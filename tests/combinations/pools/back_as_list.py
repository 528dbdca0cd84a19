# take: P.one()
# give: P.give_all([X])
# gets: optional
class Pool:
    def __init__(self, count):
        self._free = set(range(count))

    def one(self):
        return self._free.pop() if self._free else None

    def give_all(self, slots):
        self._free.update(slots)
