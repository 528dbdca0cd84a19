# take: P.seat(self.name)
# give: P.unseat(X)
# gets: optional
class Pool:
    def __init__(self, count):
        self._seats = [None] * count

    def seat(self, guest):
        try:
            index = self._seats.index(None)
        except ValueError:
            return None
        self._seats[index] = guest
        return index

    def unseat(self, index):
        self._seats[index] = None
