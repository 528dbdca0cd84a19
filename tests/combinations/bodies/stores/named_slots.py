# TRY: self.claim(X)
# UNDO: self.free(X)
class Slots:
    def __init__(self, count):
        self._free = set(range(count))

    def claim(self, slot):
        if slot not in self._free:
            return False
        self._free.remove(slot)
        return True

    def free(self, slot):
        self._free.add(slot)
