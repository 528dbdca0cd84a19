# take: P.draw(n)
# give: P.redeem(X)
# gets: optional
# type: HbmLedger
from typing import NamedTuple, Optional


class HbmTicket(NamedTuple):
    serial: int
    mbytes: int


class HbmLedger:
    def __init__(self, total_mb: int):
        self.total_mb = total_mb
        self._open: dict[int, HbmTicket] = {}
        self._next = 0

    def _committed(self) -> int:
        return sum(t.mbytes for t in self._open.values())

    def draw(self, mbytes: int) -> Optional[HbmTicket]:
        if self._committed() + mbytes > self.total_mb:
            return None
        ticket = HbmTicket(self._next, mbytes)
        self._next += 1
        self._open[ticket.serial] = ticket
        return ticket

    def redeem(self, ticket: HbmTicket) -> None:
        if self._open.pop(ticket.serial, None) is None:
            raise LookupError(f"ticket {ticket.serial} already redeemed")
