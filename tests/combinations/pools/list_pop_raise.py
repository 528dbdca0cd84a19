# take: P.borrow()
# give: P.restore(X)
# gets: value
class Pool:
    def __init__(self, count):
        self._idle = list(range(count))

    def borrow(self):
        if not self._idle:
            raise RuntimeError("no slot left")
        return self._idle.pop()

    def restore(self, slot):
        self._idle.append(slot)
