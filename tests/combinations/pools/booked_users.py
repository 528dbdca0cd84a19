# take: P.book(n, key, 8)
# give: P.unbook(n, key)
# gets: nothing
class Pool:
    def __init__(self, slots):
        self.room = slots
        self.users = {}
        self.sizes = {}

    def can_book(self, size):
        return size <= self.room

    def book(self, rid, name, size):
        if name in self.users:
            self.users[name].add(rid)
            return
        self.room -= size
        self.sizes[name] = size
        self.users[name] = {rid}

    def unbook(self, rid, name):
        users = self.users.get(name)
        if users is None:
            return
        users.discard(rid)
        if not users:
            del self.users[name]
            self.room += self.sizes.pop(name)
