# take: P.board(n)
# give: P.alight(X)
# gets: optional
class Ids:
    def __init__(self, count):
        self._unused = deque(range(count))

    def issue(self) -> int:
        return self._unused.popleft()

    def retire(self, number: int) -> None:
        self._unused.append(number)


class Window:
    def __init__(self, size):
        self.left = size

    def claim(self, size):
        if size > self.left:
            return False
        self.left -= size
        return True

    def refund(self, size):
        self.left += size


class Ticket:
    def __init__(self, number, size):
        self.number = number
        self.size = size


class Pool:
    """A number and an amount in one record."""

    def __init__(self, ids: Ids, window: Window):
        self.ids = ids
        self.window = window

    def board(self, size):
        if not self.window.claim(size):
            return None
        return Ticket(self.ids.issue(), size)

    def alight(self, ticket):
        self.ids.retire(ticket.number)
        self.window.refund(ticket.size)
