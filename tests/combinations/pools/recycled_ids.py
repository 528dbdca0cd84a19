# take: P.new_id()
# give: P.recycle_id(X)
# gets: optional
class Pool:
    def __init__(self, limit):
        self.limit = limit
        self._next = 0
        self._recycled = []

    def new_id(self):
        if self._recycled:
            return self._recycled.pop()
        if self._next == self.limit:
            return None
        number = self._next
        self._next += 1
        return number

    def recycle_id(self, number):
        self._recycled.append(number)
