"""Permits for concurrent forward passes of the reward model."""
from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import AsyncIterator, Optional


class Permit:
    __slots__ = ("serial", "weight", "spent")

    def __init__(self, serial: int, weight: int) -> None:
        self.serial = serial
        self.weight = weight
        self.spent = False


class PermitDesk:
    def __init__(self, total: int) -> None:
        self._left = total
        self._serial = 0
        self._cond = asyncio.Condition()

    async def obtain(self, weight: int = 1) -> Permit:
        async with self._cond:
            while self._left < weight:
                await self._cond.wait()
            self._left -= weight
            self._serial += 1
            return Permit(self._serial, weight)

    def obtain_nowait(self, weight: int = 1) -> Optional[Permit]:
        if self._left < weight:
            return None
        self._left -= weight
        self._serial += 1
        return Permit(self._serial, weight)

    async def surrender(self, permit: Permit) -> None:
        async with self._cond:
            permit.spent = True
            self._left += permit.weight
            self._cond.notify_all()

    def surrender_nowait(self, permit: Permit) -> None:
        permit.spent = True
        self._left += permit.weight


@asynccontextmanager
async def permitted(desk: PermitDesk, weight: int = 1) -> AsyncIterator[Permit]:
    permit = await desk.obtain(weight)  # clean: surrendered in finally
    try:
        yield permit
    finally:
        await desk.surrender(permit)


@asynccontextmanager
async def permitted_unless(desk: PermitDesk, skip: bool) -> AsyncIterator[Optional[Permit]]:
    permit = None
    if not skip:
        permit = await desk.obtain()  # clean: near miss, not None exactly when it was obtained
    try:
        yield permit
    finally:
        if permit is not None:
            await desk.surrender(permit)
