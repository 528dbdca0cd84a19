# take: P.use(key)
# give: P.let_go(X)
# gets: optional
class Entry:
    def __init__(self, data):
        self.data = data
        self.refs = 0


class Pool:
    def __init__(self):
        self._entries = {}

    def use(self, key):
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.refs += 1
        return entry

    def let_go(self, entry):
        entry.refs -= 1
