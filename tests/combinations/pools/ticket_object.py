# take: P.admit(n)
# give: P.settle(X)
# gets: optional
@dataclass
class Ticket:
    tokens: int
    settled: bool = False


class Pool:
    def __init__(self, capacity):
        self._room = capacity

    def admit(self, tokens):
        if tokens > self._room:
            return None
        self._room -= tokens
        return Ticket(tokens)

    def settle(self, ticket):
        if not ticket.settled:
            ticket.settled = True
            self._room += ticket.tokens
