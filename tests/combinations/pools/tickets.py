# take: P.issue(4)
# give: P.redeem(X)
# gets: optional
@dataclass(frozen=True)
class Ticket:
    number: int
    units: int


class Pool:
    def __init__(self, units):
        self._units = units
        self._issued = 0

    def issue(self, units):
        if units > self._units:
            return None
        self._units -= units
        self._issued += 1
        return Ticket(self._issued, units)

    def redeem(self, ticket):
        self._units += ticket.units
