import asyncio
from collections import deque


class PermitPool:
    def __init__(self, n):
        self._sem = asyncio.Semaphore(n)
        self._n = n
        self._serial = 0

    async def obtain(self):
        await self._sem.acquire()
        self._serial += 1
        return self._serial

    def surrender(self, permit):
        self._sem.release()


class OrderGateway:
    def __init__(self, permits, window):
        self.permits = permits
        self.window = window
        self.pending = deque()
        self.active = {}
        self.rejected = 0

    async def submit(self, order):
        permit = await self.permits.obtain()  # leak: promote drops what does not fit the window
        self.pending.append((order["id"], permit, order))

    def promote(self):
        moved = 0
        while self.pending:
            oid, permit, order = self.pending.popleft()
            if len(self.active) >= self.window:
                self.rejected += 1
                continue
            self.active[oid] = (permit, order)
            moved += 1
        return moved

    def filled(self, oid, price):
        entry = self.active.pop(oid, None)
        if entry is None:
            return None
        permit, order = entry
        self.permits.surrender(permit)
        return order["qty"] * price

    async def cancel_all(self):
        for permit, _ in self.active.values():
            self.permits.surrender(permit)
        self.active.clear()
        for _, permit, _ in self.pending:
            self.permits.surrender(permit)
        self.pending.clear()


class Quoter:
    def __init__(self, permits):
        self.permits = permits
        self.bid = None
        self.ask = None

    async def quote(self, mid, spread):
        if self.bid is not None or self.ask is not None:
            return None
        self.bid = await self.permits.obtain()  # clean: withdraw gives it back
        self.ask = await self.permits.obtain()  # leak: withdraw gives back the bid twice, never the ask
        return mid - spread / 2, mid + spread / 2

    async def probe(self):
        permit = await self.permits.obtain()  # clean: given back in finally
        try:
            await asyncio.sleep(0)
        finally:
            self.permits.surrender(permit)

    def withdraw(self):
        if self.bid is None:
            return
        bid, self.bid, self.ask = self.bid, None, None
        self.permits.surrender(bid)
        self.permits.surrender(bid)
