# take: P.allocate(self.name)
# give: P.deallocate(X)
# gets: optional
class Pool:
    def __init__(self, count):
        self._free = list(range(count))
        self._owner = {}

    def allocate(self, who):
        if not self._free:
            return None
        slot = self._free.pop(0)
        self._owner[slot] = who
        return slot

    def deallocate(self, slot):
        del self._owner[slot]
        self._free.append(slot)
