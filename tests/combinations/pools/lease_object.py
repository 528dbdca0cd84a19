# take: P.lease()
# give: X.end()
# gets: optional
class Lease:
    def __init__(self, owner, slot):
        self.owner = owner
        self.slot = slot

    def end(self):
        self.owner._free.append(self.slot)


class Pool:
    def __init__(self, count):
        self._free = list(range(count))

    def lease(self):
        if not self._free:
            return None
        return Lease(self, self._free.pop())
