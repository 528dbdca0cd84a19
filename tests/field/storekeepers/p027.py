from dataclasses import dataclass, replace
from typing import Dict, Optional


class OrderIds:
    def __init__(self, prefix: str, count: int):
        self._free = ["%s%04d" % (prefix, i) for i in range(count)]
        self.peak = 0

    def issue(self) -> str:
        self.peak += 1
        return self._free.pop()

    def retire(self, oid: str) -> None:
        self._free.append(oid)


@dataclass(frozen=True)
class Order:
    symbol: str
    qty: int
    price: float
    oid: str
    hedge: Optional[str] = None


class Book:
    def __init__(self, ids: OrderIds):
        self.ids = ids
        self.live: Dict[str, Order] = {}
        self.volume = 0

    def place(self, tag: str, symbol: str, qty: int, price: float) -> bool:
        if tag in self.live:
            return False
        oid = self.ids.issue()  # leak: amend replaces the record and the old id is not retired
        self.live[tag] = Order(symbol, qty, price, oid)
        return True

    def amend(self, tag: str, price: float) -> str:
        old = self.live[tag]
        oid = self.ids.issue()  # leak: a second amend drops this one as well
        self.live[tag] = replace(old, price=price, oid=oid)
        return oid

    def hedge(self, tag: str) -> str:
        old = self.live[tag]
        if old.hedge is not None:
            return old.hedge
        hid = self.ids.issue()  # clean: unhedge and close retire it
        self.live[tag] = replace(old, hedge=hid)
        return hid

    def unhedge(self, tag: str) -> None:
        old = self.live[tag]
        if old.hedge is not None:
            self.ids.retire(old.hedge)
            self.live[tag] = replace(old, hedge=None)

    def close(self, tag: str) -> float:
        order = self.live.pop(tag)
        self.ids.retire(order.oid)
        if order.hedge is not None:
            self.ids.retire(order.hedge)
        self.volume += order.qty
        return order.qty * order.price

    def immediate(self, symbol: str, qty: int, send) -> float:
        oid = self.ids.issue()  # clean: retired below
        price = send(oid, symbol, qty)
        self.ids.retire(oid)
        self.volume += qty
        return price
