"""Prepaid token credit: holds against accounts while requests, baskets and subscriptions are open."""
from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


@dataclass
class Hold:
    account: str
    amount: int
    open: bool = True


class Ledger:
    def __init__(self, balances: dict[str, int]) -> None:
        self._balance = dict(balances)
        self._held: dict[str, int] = {name: 0 for name in balances}

    def hold(self, account: str, amount: int) -> Hold | None:
        if self._balance[account] - self._held[account] < amount:
            return None
        self._held[account] += amount
        return Hold(account, amount)

    def lift(self, hold: Hold) -> None:
        if hold.open:
            hold.open = False
            self._held[hold.account] -= hold.amount

    def charge(self, account: str, amount: int) -> None:
        self._balance[account] -= amount


class State(Enum):
    OPEN = 1
    SUSPENDED = 2
    DONE = 3


@dataclass
class Request:
    rid: str
    account: str
    hold: Hold
    state: State = State.OPEN


@dataclass
class Quote:
    qid: str
    account: str
    hold: Hold
    revisions: int = 0


@dataclass
class Basket:
    account: str
    holds: list[Hold] = field(default_factory=list)


class Desk:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.requests: dict[str, Request] = {}
        self.quotes: dict[str, Quote] = {}
        self.baskets: dict[int, Basket] = {}
        self.bundles: dict[int, Basket] = {}
        self.margin: dict[str, Hold] = {}
        self.floors: dict[str, Hold] = {}
        self._next = 0

    def open(self, rid: str, account: str, estimate: int) -> bool:
        if rid in self.requests:
            return False
        hold = self.ledger.hold(account, estimate)  # leak: amend assigns another hold over it
        if hold is None:
            return False
        self.requests[rid] = Request(rid, account, hold)
        return True

    def amend(self, rid: str, estimate: int) -> bool:
        request = self.requests[rid]
        larger = self.ledger.hold(request.account, estimate)  # leak: overwritten by the next amend
        if larger is None:
            return False
        request.hold = larger
        return True

    def complete(self, rid: str, used: int) -> None:
        request = self.requests.pop(rid)
        request.state = State.DONE
        self.ledger.charge(request.account, used)
        self.ledger.lift(request.hold)

    def quote(self, qid: str, account: str, price: int) -> bool:
        hold = self.ledger.hold(account, price)  # clean: near miss, lifted where the id is taken too
        if hold is None:
            return False
        if qid in self.quotes:
            self.ledger.lift(hold)
            return False
        self.quotes[qid] = Quote(qid, account, hold)
        return True

    def requote(self, qid: str, price: int) -> bool:
        quote = self.quotes[qid]
        fresh = self.ledger.hold(quote.account, price)  # clean: near miss, the old one is lifted first
        if fresh is None:
            return False
        self.ledger.lift(quote.hold)
        quote.hold = fresh
        quote.revisions += 1
        return True

    def accept(self, qid: str) -> int:
        quote = self.quotes.pop(qid)
        self.ledger.charge(quote.account, quote.hold.amount)
        self.ledger.lift(quote.hold)
        return quote.revisions

    def basket(self, account: str, amounts: list[int]) -> int:
        basket = Basket(account)
        for amount in amounts:
            hold = self.ledger.hold(account, amount)  # leak: fill pops the basket, lifts filled lines only
            if hold is None:
                break
            basket.holds.append(hold)
        self._next += 1
        self.baskets[self._next] = basket
        return self._next

    def fill(self, number: int, lines: int) -> int:
        basket = self.baskets.pop(number)
        spent = 0
        for hold in basket.holds[:lines]:
            spent += hold.amount
            self.ledger.lift(hold)
        self.ledger.charge(basket.account, spent)
        return spent

    def bundle(self, account: str, amounts: list[int]) -> int:
        bundle = Basket(account)
        for amount in amounts:
            hold = self.ledger.hold(account, amount)  # clean: near miss, deliver charges a part but lifts all
            if hold is None:
                break
            bundle.holds.append(hold)
        self._next += 1
        self.bundles[self._next] = bundle
        return self._next

    def deliver(self, number: int, lines: int) -> int:
        bundle = self.bundles.pop(number)
        spent = 0
        for i, hold in enumerate(bundle.holds):
            self.ledger.lift(hold)
            if i >= lines:
                continue
            spent += hold.amount
        self.ledger.charge(bundle.account, spent)
        return spent

    def set_margins(self, wanted: dict[str, int]) -> None:
        """Daily; every account that trades has a margin from the day before."""
        placed: dict[str, Hold] = {}
        for account, amount in wanted.items():
            hold = self.ledger.hold(account, amount)  # leak: update replaces yesterday's hold of the account
            if hold is not None:
                placed[account] = hold
        self.margin.update(placed)

    def drop_margin(self, account: str) -> None:
        hold = self.margin.pop(account, None)
        if hold is not None:
            self.ledger.lift(hold)

    def set_floors(self, wanted: dict[str, int]) -> None:
        for account, amount in wanted.items():
            old = self.floors.pop(account, None)
            if old is not None:
                self.ledger.lift(old)
            hold = self.ledger.hold(account, amount)  # clean: near miss, the entry before is lifted above
            if hold is not None:
                self.floors[account] = hold

    def drop_floor(self, account: str) -> None:
        if (hold := self.floors.pop(account, None)) is not None:
            self.ledger.lift(hold)
