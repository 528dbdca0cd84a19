"""Weighted permits for a bulk loader: heavy statements take several at once."""
import asyncio


class WeightedGate:
    def __init__(self, permits):
        self._permits = permits
        self._line = []

    async def enter(self, weight):
        if not self._line and self._permits >= weight:
            self._permits -= weight
            return
        fut = asyncio.get_running_loop().create_future()
        self._line.append((weight, fut))
        await fut

    def leave(self, weight):
        self._permits += weight
        while self._line and self._line[0][0] <= self._permits:
            w, fut = self._line.pop(0)
            self._permits -= w
            fut.set_result(None)


class Loader:
    def __init__(self, gate, db):
        self.gate = gate
        self.db = db

    async def load(self, table, rows):
        weight = 1 + len(rows) // 1000
        await self.gate.enter(weight)  # clean: left with the same weight in finally
        try:
            await self.db.copy(table, rows)
        finally:
            self.gate.leave(weight)

    async def vacuum(self, table):
        await self.gate.enter(4)  # leak: a small table returns without leaving
        if await self.db.dead_rows(table) < 1000:
            return False
        await self.db.execute(f"VACUUM {table}")
        self.gate.leave(4)
        return True

    async def analyze(self, tables):
        for table in tables:
            await self.gate.enter(2)  # leak: temporary tables continue without leaving
            if table.startswith("tmp_"):
                continue
            await self.db.execute(f"ANALYZE {table}")
            self.gate.leave(2)

    async def swap(self, a, b):
        await self.gate.enter(3)  # clean: left in two parts that add up to three
        await self.db.execute(f"ALTER TABLE {a} RENAME TO {a}_old")
        self.gate.leave(1)
        await self.db.execute(f"ALTER TABLE {b} RENAME TO {a}")
        self.gate.leave(2)
