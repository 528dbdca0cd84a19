# take: P.book(key, n)
# give: P.unbook(key)
# gets: nothing
class Pool:
    def __init__(self, slots):
        self.room = slots
        self.sizes = {}

    def can_book(self, size):
        return size <= self.room

    def book(self, name, size):
        self.room -= size
        self.sizes[name] = size

    def unbook(self, name):
        self.room += self.sizes.pop(name)
