"""Seat holds of a ticket office, returned in result objects."""
from dataclasses import dataclass
from typing import Generic, Optional, TypeVar

T = TypeVar("T")


@dataclass
class Result(Generic[T]):
    value: Optional[T] = None
    error: str = ""

    @property
    def ok(self):
        return not self.error


class SeatPlan:
    def __init__(self, seats):
        self._open = set(seats)
        self._sold = set()

    def hold(self, seat):
        if seat not in self._open:
            return False
        self._open.remove(seat)
        return True

    def let_go(self, seat):
        self._open.add(seat)

    def sell(self, seat):
        self._sold.add(seat)


class TicketOffice:
    def __init__(self, plan, bank):
        self.plan = plan
        self.bank = bank
        self.takings = 0

    def hold(self, seat):
        if self.plan.hold(seat):  # clean: handed on in the result
            return Result(seat)
        return Result(error=f"{seat} is taken")

    def buy(self, seat, card, price):
        held = self.hold(seat)  # clean: sold or let go
        if not held.ok:
            return held
        if not self.bank.charge(card, price):
            self.plan.let_go(seat)
            return Result(error="card refused")
        self.plan.sell(seat)
        self.takings += price
        return held

    def buy_pair(self, left, right, card, price):
        a = self.hold(left)  # leak: the right seat is taken, the left one stays held
        b = self.hold(right)  # clean: let go when the left one is taken
        if not a.ok:
            if b.ok:
                self.plan.let_go(right)
            return a
        if not b.ok:
            return b
        self.bank.charge(card, 2 * price)
        self.plan.sell(left)
        self.plan.sell(right)
        return Result((left, right))

    def open_in(self, row):
        return sum(self.hold(seat).ok for seat in row)  # leak: the results are counted and dropped

    def quote(self, seat, table):
        held = self.hold(seat)  # clean: let go after the look-up
        if not held.ok:
            return None
        price = table[seat[0]]
        self.plan.let_go(held.value)
        return price
