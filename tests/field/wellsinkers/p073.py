"""Card authorizations: money held, then captured or voided."""
import decimal
from dataclasses import dataclass, field


@dataclass
class Card:
    limit: decimal.Decimal
    charged: decimal.Decimal = decimal.Decimal(0)
    holds: dict = field(default_factory=dict)

    def open_to_buy(self):
        return self.limit - self.charged - sum(self.holds.values())


class Acquirer:
    def __init__(self):
        self.cards = {}
        self.serial = 0

    def authorize(self, pan, amount):
        card = self.cards[pan]
        if amount > card.open_to_buy():
            return None
        self.serial += 1
        code = (pan, self.serial)
        card.holds[code] = amount
        return code

    def capture(self, code, amount=None):
        card = self.cards[code[0]]
        held = card.holds.pop(code)
        card.charged += held if amount is None else min(held, amount)

    def void(self, code):
        self.cards[code[0]].holds.pop(code, None)


class Checkout:
    def __init__(self, acquirer, stock):
        self.acquirer = acquirer
        self.stock = stock
        self.unshipped = {}

    def place(self, order):
        code = self.acquirer.authorize(order.pan, order.total)  # leak: no stock, no void
        if code is None:
            return "declined"
        if not self.stock.take(order.items):
            return "no stock"
        self.unshipped[order.id] = code
        return "placed"

    def ship(self, order_id):
        self.acquirer.capture(self.unshipped.pop(order_id))

    def buy_now(self, order):
        code = self.acquirer.authorize(order.pan, order.total)  # clean: captured or voided
        if code is None:
            return False
        took = self.stock.take(order.items)
        if took:
            self.acquirer.capture(code)
        else:
            self.acquirer.void(code)
        return took


def card_works(acquirer, pan):
    return acquirer.authorize(pan, decimal.Decimal(1)) is not None  # leak: test hold never voided
