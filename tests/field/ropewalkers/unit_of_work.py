"""Units of work of the order service: transactions, savepoints, advisory locks and their nesting."""
from __future__ import annotations

import logging
import zlib
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Callable, Iterator

log = logging.getLogger("orders")


@dataclass(eq=False)
class Tx:
    number: int
    statements: list[str] = field(default_factory=list)
    advisory: set[int] = field(default_factory=set)
    parent: "Tx | None" = None


class Engine:
    """A begun transaction occupies a backend until finish; locks of the session outlive it."""

    def __init__(self, backends: int) -> None:
        self.backends = backends
        self.active: dict[int, Tx] = {}
        self.locked: dict[int, int] = {}
        self._n = 0

    def begin(self, parent: Tx | None = None) -> Tx:
        self._n += 1
        tx = self.active[self._n] = Tx(self._n, parent=parent)
        return tx

    def finish(self, tx: Tx, commit: bool) -> None:
        if commit and tx.parent is not None:
            tx.parent.statements += tx.statements
        del self.active[tx.number]

    def advisory_lock(self, key: str) -> int | None:
        """Session level: stays until advisory_unlock, whatever becomes of the transaction."""
        n = zlib.crc32(key.encode())
        if self.locked.get(n):
            return None
        self.locked[n] = 1
        return n

    def advisory_unlock(self, n: int) -> None:
        self.locked.pop(n, None)


engine = Engine(32)


class UnitOfWork:
    """with UnitOfWork() as tx: commits at the end, rolls back after an exception."""

    def __init__(self) -> None:
        self.tx: Tx | None = None

    def __enter__(self) -> Tx:
        self.tx = engine.begin()  # clean: finished either way by __exit__
        return self.tx

    def __exit__(self, kind, value, tb) -> bool:
        engine.finish(self.tx, commit=kind is None)
        self.tx = None
        return False


class ReadOnlyUnit(UnitOfWork):
    """Nothing to commit when nothing was written."""

    def __enter__(self) -> Tx:
        self.tx = engine.begin()  # leak: __exit__ returns early when no statement was recorded
        return self.tx

    def __exit__(self, kind, value, tb) -> bool:
        if not self.tx.statements:
            self.tx = None
            return False
        log.warning("%d statements in a read only unit", len(self.tx.statements))
        engine.finish(self.tx, commit=False)
        self.tx = None
        return False


@contextmanager
def savepoint(parent: Tx) -> Iterator[Tx]:
    inner = engine.begin(parent)  # clean: finished after the body or on the exception
    try:
        yield inner
    except Exception:
        engine.finish(inner, commit=False)
        raise
    engine.finish(inner, commit=True)


@contextmanager
def locked(key: str) -> Iterator[bool]:
    n = engine.advisory_lock(key)  # clean: None-checked, unlocked in the finally
    if n is None:
        yield False
        return
    try:
        yield True
    finally:
        engine.advisory_unlock(n)


@contextmanager
def batch_window(name: str, closed: bool) -> Iterator[bool]:
    """Lock of a batch run; a window which is closed tells the body to do nothing."""
    n = engine.advisory_lock("batch:" + name)  # leak: the closed window never unlocks
    if n is None or closed:
        yield False
        return
    try:
        yield True
    finally:
        engine.advisory_unlock(n)


@dataclass
class Order:
    id: int
    lines: dict[str, int]
    state: str = "new"


class OrderService:
    def __init__(self, stock: dict[str, int]) -> None:
        self.stock = stock
        self.orders: dict[int, Order] = {}
        self.reserved: dict[int, list[int]] = {}

    def place(self, order: Order) -> bool:
        with UnitOfWork() as tx:  # clean: context manager
            if order.id in self.orders:
                return False
            for sku, n in order.lines.items():
                with savepoint(tx) as sp:  # clean: context manager
                    sp.statements.append(f"insert line {sku} {n}")
            self.orders[order.id] = order
            return True

    def stock_of(self, sku: str) -> int:
        with ReadOnlyUnit():  # clean: near miss, the class is at fault and labelled there
            return self.stock.get(sku, 0)

    def cancel(self, order_id: int) -> bool:
        with locked(f"order:{order_id}") as mine:  # clean: context manager
            if not mine:
                return False
            tx = engine.begin()  # leak: a shipped order returns with the transaction begun
            order = self.orders.get(order_id)
            if order is not None and order.state == "shipped":
                return False
            tx.statements.append(f"delete order {order_id}")
            self.orders.pop(order_id, None)
            engine.finish(tx, commit=True)
            return True

    def reserve(self, order: Order) -> bool:
        """Locks the stock of all lines; ship or release unlocks it."""
        if order.id in self.reserved:
            return False
        held: list[int] = []
        for sku in sorted(order.lines):
            n = engine.advisory_lock("sku:" + sku)  # clean: near miss, rolled back here, ended by the others
            if n is None:
                for m in held:
                    engine.advisory_unlock(m)
                return False
            held.append(n)
        self.reserved[order.id] = held
        return True

    def ship(self, order: Order) -> None:
        for n in self.reserved.pop(order.id, []):
            engine.advisory_unlock(n)
        order.state = "shipped"

    def release(self, order: Order) -> None:
        for n in self.reserved.pop(order.id, ()):
            engine.advisory_unlock(n)
        order.state = "new"

    def recount(self, skus: list[str], count: Callable[[str], int]) -> int:
        changed = 0
        with ExitStack() as stack:
            for sku in skus:
                n = engine.advisory_lock("sku:" + sku)  # clean: unlocked by the stack
                if n is None:
                    continue
                stack.callback(engine.advisory_unlock, n)
                fresh = count(sku)
                changed += fresh != self.stock.get(sku)
                self.stock[sku] = fresh
        return changed

    def audit(self, skus: list[str], count: Callable[[str], int]) -> list[str]:
        wrong = []
        with ExitStack() as stack:
            for sku in skus:
                n = engine.advisory_lock("sku:" + sku)  # leak: a count of zero goes on before the callback
                if n is None:
                    continue
                found = count(sku)
                if found == 0:
                    wrong.append(sku)
                    continue
                stack.callback(engine.advisory_unlock, n)
                if found != self.stock.get(sku):
                    wrong.append(sku)
        return wrong

    def nightly(self, closed: bool) -> int:
        with batch_window("nightly", closed) as go:  # clean: near miss, the manager's own fault
            if not go:
                return 0
            return sum(1 for o in self.orders.values() if o.state == "new")

    def split(self, order: Order, keep: set[str], outer: Tx | None = None) -> Order | None:
        """Two orders out of one. The outer transaction is owned by the caller if there is one."""
        own = outer is None
        tx = engine.begin() if own else outer  # clean: near miss, finished under the same flag
        rest = {s: n for s, n in order.lines.items() if s not in keep}
        new = Order(order.id + 1_000_000, rest) if rest else None
        if new is not None:
            tx.statements.append(f"insert order {new.id}")
            order.lines = {s: n for s, n in order.lines.items() if s in keep}
        if own:
            engine.finish(tx, commit=new is not None)
        return new
