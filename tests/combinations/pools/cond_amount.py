# take: P.consume(n)
# give: P.replenish(n)
# gets: nothing
class Pool:
    def __init__(self, total):
        self._left = total
        self._changed = threading.Condition()

    def consume(self, amount):
        with self._changed:
            self._changed.wait_for(lambda: self._left >= amount)
            self._left -= amount

    def replenish(self, amount):
        with self._changed:
            self._left += amount
            self._changed.notify_all()
