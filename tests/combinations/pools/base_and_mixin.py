# take: P.lend()
# give: P.reclaim(X)
# gets: optional
class Stock:
    def __init__(self, count):
        self._items = list(range(count))

    def _out(self):
        return self._items.pop() if self._items else None

    def _in(self, item):
        self._items.append(item)


class StatsMixin:
    lent = 0

    def note_lent(self):
        self.lent += 1

    def note_back(self):
        self.lent -= 1


class Pool(StatsMixin, Stock):
    def lend(self):
        item = self._out()
        if item is not None:
            self.note_lent()
        return item

    def reclaim(self, item):
        self.note_back()
        self._in(item)
