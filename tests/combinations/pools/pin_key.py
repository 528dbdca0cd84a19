# take: P.pin(key)
# give: P.unpin(key)
# gets: nothing
class Pool:
    def __init__(self):
        self._pins = {}

    def pin(self, key):
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key):
        self._pins[key] -= 1
        if self._pins[key] == 0:
            del self._pins[key]
