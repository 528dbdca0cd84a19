# take: P.draw()
# give: P.hand_in(X.serial)
# gets: optional
# type: TicketBooth
from datetime import datetime, timezone
from typing import NamedTuple


class Ticket(NamedTuple):
    serial: int
    issued: datetime


class TicketBooth:
    """Admission control in front of the engine. No ticket: answer 429."""

    def __init__(self, max_outstanding=256):
        self.max_outstanding = max_outstanding
        self._outstanding = dict()
        self._last = 0

    def draw(self):
        if len(self._outstanding) >= self.max_outstanding:
            return None
        self._last += 1
        t = Ticket(self._last, datetime.now(timezone.utc))
        self._outstanding[t.serial] = t
        return t

    def hand_in(self, serial):
        if self._outstanding.pop(serial, None) is None:
            raise LookupError("unknown or already returned ticket %d" % serial)

    def oldest(self):
        return min(self._outstanding.values(), default=None)
