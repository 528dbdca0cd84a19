# take: P.hire()
# give: P.dismiss(X)
# gets: optional
class Inner:
    def __init__(self, count):
        self._free = list(range(count))

    def pop_slot(self):
        return self._free.pop() if self._free else None

    def push_slot(self, slot):
        self._free.append(slot)


class Pool:
    def __init__(self, inner: Inner):
        self._inner = inner
        self.taken = 0

    def hire(self):
        slot = self._inner.pop_slot()
        if slot is None:
            return None
        self.taken += 1
        return slot

    def dismiss(self, slot):
        self.taken -= 1
        self._inner.push_slot(slot)
