"""Margin reservations of an order gateway."""
import enum


class Side(enum.Enum):
    BUY = 1
    SELL = 2


class Reservation:
    def __init__(self, ledger, amount):
        self.ledger = ledger
        self.amount = amount

    def commit(self):
        self.ledger.reserved -= self.amount
        self.ledger.spent += self.amount

    def cancel(self):
        self.ledger.reserved -= self.amount


class MarginLedger:
    def __init__(self, limit):
        self.limit = limit
        self.reserved = 0
        self.spent = 0

    def reserve(self, amount):
        if self.reserved + self.spent + amount > self.limit:
            return None
        self.reserved += amount
        return Reservation(self, amount)


class Desk:
    tick = 0.01

    def __init__(self, ledger, venue):
        self.ledger = ledger
        self.venue = venue
        self.rejects = 0

    @property
    def unit_hold(self):
        return self.ledger.reserve(self.tick)  # clean: the property hands it on

    def _hold(self, side, qty, price):
        factor = 1.0 if side is Side.BUY else 0.5
        return self.ledger.reserve(qty * price * factor)  # clean: handed to the caller

    def place(self, side, qty, price):
        hold = self._hold(side, qty, price)  # clean: committed or cancelled
        if hold is None:
            self.rejects += 1
            return None
        order_id = self.venue.submit(side.name, qty, price)
        if order_id is None:
            hold.cancel()
            return None
        hold.commit()
        return order_id

    def place_fill_or_kill(self, side, qty, price):
        hold = self._hold(side, qty, price)  # leak: a part fill neither commits nor cancels
        if hold is None:
            return 0
        filled = self.venue.fok(side.name, qty, price)
        if filled == qty:
            hold.commit()
        elif filled == 0:
            hold.cancel()
        return filled

    def can_trade(self):
        return self.unit_hold is not None and self.venue.is_open()  # leak: the hold is dropped

    def heartbeat(self):
        alive, hold = self.venue.ping(), self.unit_hold  # clean: cancelled unless refused
        if hold is None:
            return False
        hold.cancel()
        return alive
