"""Admission control for the image-generation front door: token permits and per-tenant lanes."""
from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Optional


class PermitBank:
    """Counts diffusion steps in flight. ``withdraw`` is undone by ``deposit``."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.left = total
        self._waiters: deque[tuple[int, asyncio.Future]] = deque()

    def try_withdraw(self, n: int) -> bool:
        if n > self.left:
            return False
        self.left -= n
        return True

    async def withdraw(self, n: int) -> "Permit":
        while not self.try_withdraw(n):  # clean: wrapped in the Permit that is returned
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append((n, fut))
            await fut
        return Permit(self, n)

    def deposit(self, n: int) -> None:
        self.left += n
        while self._waiters and self._waiters[0][0] <= self.left:
            _, fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break


@dataclass
class Permit:
    bank: PermitBank
    steps: int
    live: bool = True

    def close(self) -> None:
        if self.live:
            self.live = False
            self.bank.deposit(self.steps)


@dataclass
class GenRequest:
    request_id: str
    tenant: str
    steps: int
    prompt: str = ""
    permit: Optional[Permit] = None
    result: list[str] = field(default_factory=list)


class Rejected(Exception):
    pass


Denoise = Callable[[GenRequest], Awaitable[str]]


class FrontDoor:
    def __init__(self, bank: PermitBank, denoise: Denoise, lanes: int = 2) -> None:
        self.bank = bank
        self.denoise = denoise
        self.lane = asyncio.Semaphore(lanes)
        self._tasks: set[asyncio.Task] = set()
        self._parked: dict[str, GenRequest] = {}

    async def generate(self, req: GenRequest) -> str:
        permit = await self.bank.withdraw(req.steps)  # clean: closed in finally
        try:
            return await self.denoise(req)
        finally:
            permit.close()

    async def generate_or_empty(self, req: GenRequest) -> str:
        permit = await self.bank.withdraw(req.steps)  # leak: a Rejected is turned into an empty answer and the permit stays out
        try:
            image = await self.denoise(req)
        except Rejected:
            return ""
        permit.close()
        return image

    async def submit(self, req: GenRequest) -> None:
        """The task owns the permit from here on."""
        req.permit = await self.bank.withdraw(req.steps)  # clean: near miss, moved into the request whose task closes it
        task = asyncio.create_task(self._serve(req))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, req: GenRequest) -> None:
        try:
            req.result.append(await self.denoise(req))
        finally:
            if req.permit is not None:
                req.permit.close()
                req.permit = None

    async def preview(self, req: GenRequest) -> None:
        permit = await self.bank.withdraw(1)  # leak: the task renders and never closes it
        task = asyncio.create_task(self._render_preview(req, permit))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _render_preview(self, req: GenRequest, permit: Permit) -> None:
        small = GenRequest(req.request_id, req.tenant, permit.steps, req.prompt)
        req.result.append(await self.denoise(small))

    async def upscale(self, req: GenRequest) -> None:
        permit = await self.bank.withdraw(2)  # clean: near miss, the task's done callback closes it
        task = asyncio.create_task(self._serve(req))
        self._tasks.add(task)
        task.add_done_callback(lambda t: permit.close())
        task.add_done_callback(self._tasks.discard)

    def park(self, req: GenRequest) -> bool:
        if req.request_id in self._parked:
            return False
        if not self.bank.try_withdraw(req.steps):  # clean: wrapped in a permit and parked, resume or expire closes
            return False
        req.permit = Permit(self.bank, req.steps)
        self._parked[req.request_id] = req
        return True

    async def resume(self, request_id: str) -> Optional[str]:
        req = self._parked.pop(request_id, None)
        if req is None:
            return None
        await self._serve(req)
        return req.result[-1]

    def expire(self) -> int:
        gone = 0
        while self._parked:
            _, req = self._parked.popitem()
            if req.permit is not None:
                req.permit.close()
            gone += 1
        return gone

    async def in_lane(self, req: GenRequest) -> Optional[str]:
        await self.lane.acquire()  # leak: an empty prompt returns without lane.release
        if not req.prompt:
            return None
        try:
            return await self.denoise(req)
        finally:
            self.lane.release()

    async def in_lane_timed(self, req: GenRequest, timeout: float) -> Optional[str]:
        try:
            await asyncio.wait_for(self.lane.acquire(), timeout)  # clean: near miss, a timeout has taken nothing
        except asyncio.TimeoutError:
            return None
        try:
            return await self.denoise(req)
        finally:
            self.lane.release()

    async def drain(self) -> None:
        if self._tasks:
            await asyncio.gather(*list(self._tasks), return_exceptions=True)


class TenantQuota:
    def __init__(self, bank: PermitBank, per_tenant: int) -> None:
        self.bank = bank
        self.per_tenant = per_tenant
        self.used: dict[str, int] = {}
        self.held: dict[str, list[Permit]] = {}

    def admit(self, req: GenRequest) -> bool:
        if not self.bank.try_withdraw(req.steps):  # leak: a tenant over its quota is refused with the steps withdrawn
            return False
        used = self.used.get(req.tenant, 0)
        if used + req.steps > self.per_tenant:
            return False
        self.used[req.tenant] = used + req.steps
        req.permit = Permit(self.bank, req.steps)
        return True

    def admit_burst(self, req: GenRequest, extra: int) -> bool:
        if not self.bank.try_withdraw(req.steps):  # clean: near miss, deposited again when the extra steps are missing
            return False
        if extra and not self.bank.try_withdraw(extra):  # clean: near miss, wrapped in the permit with the base steps
            self.bank.deposit(req.steps)
            return False
        req.permit = Permit(self.bank, req.steps + extra)
        return True

    async def hold(self, tenant: str, steps: int) -> None:
        permit = await self.bank.withdraw(steps)  # clean: in the tenant's list, let_go closes each
        self.held.setdefault(tenant, []).append(permit)

    def let_go(self, tenant: str) -> int:
        permits = self.held.pop(tenant, [])
        for permit in permits:
            permit.close()
        return len(permits)

    async def rebalance(self, tenant: str, steps: int) -> None:
        permit = await self.bank.withdraw(steps)  # clean: near miss, the list it replaces is let go first
        self.let_go(tenant)
        self.held[tenant] = [permit]

    def finish(self, req: GenRequest) -> None:
        self.used[req.tenant] = max(0, self.used.get(req.tenant, 0) - req.steps)
        if req.permit is not None:
            req.permit.close()
            req.permit = None


async def run_with_retry(bank: PermitBank, req: GenRequest, denoise: Denoise, tries: int) -> Optional[str]:
    for _ in range(tries):
        permit = await bank.withdraw(req.steps)  # leak: each rejected try takes another and never closes it
        try:
            image = await denoise(req)
        except Rejected:
            await asyncio.sleep(0)
            continue
        permit.close()
        return image
    return None


async def _main() -> None:
    async def denoise(req: GenRequest) -> str:
        await asyncio.sleep(0)
        return f"image:{req.request_id}"

    bank = PermitBank(8)
    door = FrontDoor(bank, denoise)
    print(await door.generate(GenRequest("a", "t", 4)))
    await door.submit(GenRequest("b", "t", 4))
    await door.upscale(GenRequest("c", "t", 4))
    door.park(GenRequest("d", "t", 2))
    await door.resume("d")
    await door.drain()
    await door.in_lane_timed(GenRequest("e", "t", 1), 1.0)
    quota = TenantQuota(bank, 6)
    await quota.hold("t", 3)
    await quota.rebalance("t", 2)
    quota.let_go("t")
    await asyncio.sleep(0)
    print("left", bank.left)


if __name__ == "__main__":
    asyncio.run(_main())
