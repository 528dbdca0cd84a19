# take: P.attach(key)
# give: P.detach(key)
# gets: nothing
from collections import Counter


class Pool:
    def __init__(self):
        self.users = Counter()
        self.loaded = {}

    def attach(self, name):
        self.users[name] += 1

    def detach(self, name):
        self.users[name] -= 1
        if not self.users[name]:
            self.loaded.pop(name, None)
