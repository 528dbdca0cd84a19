# take: P.take_slot()
# give: P.free_slot(X)
# gets: optional
class Pool:
    def __init__(self, count):
        self._slots = list(range(count))
        self._cached = {}

    def take_slot(self):
        if self._slots:
            return self._slots.pop()
        for name, entry in self._cached.items():
            if entry.pins == 0:
                del self._cached[name]
                return entry.slot
        return None

    def free_slot(self, slot):
        self._slots.append(slot)
