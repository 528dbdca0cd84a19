# take: P.try_lock(key)
# give: P.unlock(key)
# gets: answer
class Pool:
    def __init__(self):
        self._held = set()

    def try_lock(self, key):
        if key in self._held:
            return False
        self._held.add(key)
        return True

    def unlock(self, key):
        self._held.discard(key)
