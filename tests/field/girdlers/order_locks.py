"""Order processing under named locks: lock handles with fencing numbers, and a read-write lock."""
import threading
import time
from contextlib import contextmanager
from typing import NamedTuple


class Handle(NamedTuple):
    name: str
    fence: int
    owner: str


class LockRegistry:
    """Named locks. seize() returns a handle or None, free() wants the handle."""

    def __init__(self):
        self._holders = {}
        self._fence = 0
        self._mutex = threading.Lock()

    def seize(self, name, owner):
        with self._mutex:
            if name in self._holders:
                return None
            self._fence += 1
            handle = Handle(name, self._fence, owner)
            self._holders[name] = handle
            return handle

    def free(self, handle):
        with self._mutex:
            if self._holders.get(handle.name) == handle:
                del self._holders[handle.name]

    def seize_wait(self, name, owner, patience):
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            handle = self.seize(name, owner)  # clean: None-checked, handed to the caller
            if handle is not None:
                return handle
            time.sleep(0.02)
        return None

    @contextmanager
    def hold(self, name, owner):
        """Yields the handle, or None when the name is taken."""
        handle = self.seize(name, owner)  # clean: None-checked after the yield, freed in finally
        try:
            yield handle
        finally:
            if handle is not None:
                self.free(handle)


class SharedLock:
    """Many readers or one writer; each enter_ has its leave_."""

    def __init__(self):
        self.readers = 0
        self.writing = False
        self._cv = threading.Condition()

    def enter_read(self):
        with self._cv:
            self._cv.wait_for(lambda: not self.writing)
            self.readers += 1

    def leave_read(self):
        with self._cv:
            self.readers -= 1
            self._cv.notify_all()

    def try_enter_write(self):
        with self._cv:
            if self.writing or self.readers:
                return False
            self.writing = True
            return True

    def leave_write(self):
        with self._cv:
            self.writing = False
            self._cv.notify_all()


class PriceBook:
    def __init__(self):
        self.lock = SharedLock()
        self.prices = {}
        self.version = 0

    def price(self, sku, default=None):
        self.lock.enter_read()  # leak: an unknown sku returns the default without leaving
        value = self.prices.get(sku)
        if value is None:
            return default
        self.lock.leave_read()
        return value

    def total(self, lines):
        self.lock.enter_read()  # clean: left in finally
        try:
            amount = 0
            for sku, count in lines:
                if sku not in self.prices:
                    return None
                amount += self.prices[sku] * count
            return amount
        finally:
            self.lock.leave_read()

    def update(self, changes):
        if not self.lock.try_enter_write():  # clean: near miss, False means not entered; left below
            return False
        for sku, value in changes.items():
            self.prices[sku] = value
        self.version += 1
        self.lock.leave_write()
        return True

    def raise_all(self, factor):
        entered = self.lock.try_enter_write()  # leak: with an empty book it returns before leaving
        if not entered:
            return 0
        if not self.prices:
            return 0
        for sku in self.prices:
            self.prices[sku] = round(self.prices[sku] * factor, 2)
        self.version += 1
        self.lock.leave_write()
        return len(self.prices)

    def replace(self, prices, only_newer, version):
        entered = self.lock.try_enter_write()  # clean: near miss, the same flag guards the leave at the end
        changed = False
        if entered and not (only_newer and version <= self.version):
            self.prices = dict(prices)
            self.version = version
            changed = True
        if entered:
            self.lock.leave_write()
        return changed


class OrderDesk:
    def __init__(self, locks, name):
        self.locks = locks
        self.name = name
        self.book = PriceBook()
        self.open_orders = {}
        self.log = []

    def place(self, order_id, lines):
        with self.locks.hold(f"order:{order_id}", self.name) as handle:  # clean: context manager
            if handle is None:
                return False
            total = self.book.total(lines)
            if total is None:
                return False
            self.log.append((handle.fence, order_id, total))
            return True

    def move_stock(self, source, target, sku, count, stock):
        """Locks both places in the order of their names."""
        low, high = sorted((source, target))
        first = self.locks.seize_wait(f"place:{low}", self.name, 1.0)  # leak: too little stock returns
        if first is None:
            return False
        second = self.locks.seize_wait(f"place:{high}", self.name, 1.0)  # leak: too little stock returns
        if second is None:
            self.locks.free(first)
            return False
        if stock.get((source, sku), 0) < count:
            return False
        stock[source, sku] -= count
        stock[target, sku] = stock.get((target, sku), 0) + count
        self.locks.free(second)
        self.locks.free(first)
        return True

    # -- editing an order over several requests
    def open_for_edit(self, order_id, user):
        handle = self.locks.seize(f"order:{order_id}", user)  # clean: in open_orders, save and expire free it
        if handle is None:
            return None
        self.open_orders[order_id] = (handle, time.time())
        return handle.fence

    def save(self, order_id, fence, lines):
        entry = self.open_orders.get(order_id)
        if entry is None or entry[0].fence != fence:
            return False
        del self.open_orders[order_id]
        self.log.append((fence, order_id, len(lines)))
        self.locks.free(entry[0])
        return True

    def expire(self, older_than):
        now = time.time()
        for order_id, (handle, since) in list(self.open_orders.items()):
            if now - since > older_than:
                del self.open_orders[order_id]
                self.locks.free(handle)

    def close_day(self, orders):
        """Takes every order that is free and frees all taken ones at the end."""
        handles = {}
        for order_id in orders:
            handle = self.locks.seize(f"order:{order_id}", self.name)  # clean: near miss, freed below
            if handle is not None:
                handles[order_id] = handle
        closed = [order_id for order_id in orders if order_id in handles]
        self.log.append(("close", tuple(closed)))
        for handle in handles.values():
            self.locks.free(handle)
        return closed

    def archive(self, orders, is_paid):
        handles = {}
        for order_id in orders:
            handle = self.locks.seize(f"order:{order_id}", self.name)  # leak: an unpaid order stays locked
            if handle is None:
                continue
            if not is_paid(order_id):
                self.log.append(("unpaid", order_id))
                continue
            handles[order_id] = handle
        for order_id, handle in handles.items():
            self.log.append(("archived", order_id))
            self.locks.free(handle)
        return len(handles)


class Shard:
    """Owns a range of the order numbers between attach and leave."""

    def __init__(self, locks, number):
        self.locks = locks
        self.number = number
        self.range_handle = None
        self.draining = False

    def attach(self, owner):
        if self.range_handle is not None:
            return False
        self.range_handle = self.locks.seize(f"shard:{self.number}", owner)  # leak: leave() only resets it
        return self.range_handle is not None

    def leave(self):
        was_attached = self.range_handle is not None
        self.draining = False
        self.range_handle = None
        return was_attached
