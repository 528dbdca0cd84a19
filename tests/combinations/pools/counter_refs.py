# take: P.share(key)
# give: P.unshare(key)
# gets: nothing
from collections import Counter


class Pool:
    def __init__(self):
        self._users = Counter()
        self._data = {}

    def share(self, key):
        self._users[key] += 1

    def unshare(self, key):
        self._users[key] -= 1
        if self._users[key] <= 0:
            del self._users[key]
            self._data.pop(key, None)
