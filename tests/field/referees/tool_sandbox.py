"""Sandboxed tool execution for agentic RL: containers, ports and per-tenant permits in asyncio."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Awaitable, Callable, Optional

logger = logging.getLogger(__name__)


class SandboxCrashed(RuntimeError):
    pass


@dataclass
class Sandbox:
    sid: int
    port: int
    uses: int = 0

    async def execute(self, code: str) -> str:
        await asyncio.sleep(0)
        if "segfault" in code:
            raise SandboxCrashed(str(self.sid))
        self.uses += 1
        return code.upper()


class PortRange:
    def __init__(self, lo: int, hi: int) -> None:
        self.free = list(range(lo, hi))

    def claim(self) -> Optional[int]:
        return self.free.pop() if self.free else None

    def unclaim(self, port: int) -> None:
        self.free.append(port)


class SandboxFleet:
    def __init__(self, ports: PortRange, size: int, max_uses: int = 50) -> None:
        self.ports = ports
        self.size = size
        self.max_uses = max_uses
        self.live: dict[int, Sandbox] = {}
        self.idle: asyncio.Queue[Sandbox] = asyncio.Queue()

    async def start(self) -> None:
        for sid in range(self.size):
            port = self.ports.claim()  # clean: near miss, the port belongs to the sandbox in live and stop unclaims it
            if port is None:
                break
            self.live[sid] = Sandbox(sid, port)
            self.idle.put_nowait(self.live[sid])

    async def stop(self) -> None:
        for box in self.live.values():
            self.ports.unclaim(box.port)
        self.live.clear()

    async def checkout(self) -> Sandbox:
        return await self.idle.get()

    def checkin(self, box: Sandbox) -> None:
        box.uses = 0 if box.uses >= self.max_uses else box.uses
        self.idle.put_nowait(box)

    def respawn(self, box: Sandbox) -> bool:
        port = self.ports.claim()  # leak: the crashed sandbox's port is dropped when the new one takes its place in live
        if port is None:
            self.idle.put_nowait(box)
            return False
        fresh = Sandbox(box.sid, port)
        self.live[box.sid] = fresh
        self.idle.put_nowait(fresh)
        return True


class TenantPermits:
    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self.held: dict[str, int] = {}

    def enter(self, tenant: str) -> bool:
        n = self.held.get(tenant, 0)
        if n >= self.per_tenant:
            return False
        self.held[tenant] = n + 1
        return True

    def leave(self, tenant: str) -> None:
        self.held[tenant] -= 1


@dataclass
class ToolCall:
    tenant: str
    code: str
    box: Optional[Sandbox] = None
    result: Optional[str] = None


@dataclass
class Episode:
    tenant: str
    calls: list[ToolCall] = field(default_factory=list)
    box: Optional[Sandbox] = None


class ToolExecutor:
    def __init__(self, fleet: SandboxFleet, permits: TenantPermits) -> None:
        self.fleet = fleet
        self.permits = permits
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self, call: ToolCall) -> Optional[str]:
        if not self.permits.enter(call.tenant):  # clean: near miss, finally leaves for all three outcomes
            return None
        try:
            box = await self.fleet.checkout()  # clean: near miss, a crash hands it to respawn, else it is checked in
            try:
                call.result = await box.execute(call.code)
            except SandboxCrashed:
                self.fleet.respawn(box)
                return None
            except asyncio.CancelledError:
                self.fleet.checkin(box)
                raise
            self.fleet.checkin(box)
            return call.result
        finally:
            self.permits.leave(call.tenant)

    async def run_with_deadline(self, call: ToolCall, seconds: float) -> Optional[str]:
        box = await self.fleet.checkout()  # leak: the timeout handler returns None and nobody checks the sandbox in
        try:
            out = await asyncio.wait_for(box.execute(call.code), seconds)
        except asyncio.TimeoutError:
            logger.info("tool call of %s timed out", call.tenant)
            return None
        except SandboxCrashed:
            self.fleet.respawn(box)
            return None
        self.fleet.checkin(box)
        return out

    async def begin_episode(self, tenant: str) -> Optional[Episode]:
        if not self.permits.enter(tenant):  # leak: end_episode checks the sandbox in and never leaves the tenant
            return None
        box = await self.fleet.checkout()  # clean: near miss, owned by the episode and checked in by end_episode
        return Episode(tenant, box=box)

    async def episode_step(self, ep: Episode, code: str) -> str:
        assert ep.box is not None
        call = ToolCall(ep.tenant, code, box=ep.box)
        ep.calls.append(call)
        call.result = await ep.box.execute(code)
        return call.result

    def end_episode(self, ep: Episode) -> None:
        box, ep.box = ep.box, None
        if box is not None:
            self.fleet.checkin(box)

    async def play(self, tenant: str, policy: Callable[[str], Awaitable[Optional[str]]]) -> int:
        ep = await self.begin_episode(tenant)  # clean: near miss, every exit of the loop and the handler end the episode
        if ep is None:
            return 0
        obs = ""
        try:
            while (code := await policy(obs)) is not None:
                obs = await self.episode_step(ep, code)
        except SandboxCrashed:
            return -1
        finally:
            self.end_episode(ep)
        return len(ep.calls)

    async def spawn(self, call: ToolCall) -> bool:
        if not self.permits.enter(call.tenant):  # clean: near miss, _background leaves when the task ends
            return False
        call.box = await self.fleet.checkout()  # clean: near miss, moved into the task through call.box
        task = asyncio.create_task(self._background(call))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    async def _background(self, call: ToolCall) -> None:
        assert call.box is not None
        try:
            call.result = await call.box.execute(call.code)
        except SandboxCrashed:
            call.result = None
        finally:
            self.fleet.checkin(call.box)
            self.permits.leave(call.tenant)

    async def batch(self, calls: list[ToolCall]) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for call in calls:
            if not self.permits.enter(call.tenant):  # leak: a call whose code is cached continues without leaving
                continue
            if call.code in results:
                continue
            results[call.code] = await self._one(call)
            self.permits.leave(call.tenant)
        return results

    async def _one(self, call: ToolCall) -> Optional[str]:
        box = await self.fleet.checkout()  # clean: near miss, finally checks in whatever execute does
        try:
            return await box.execute(call.code)
        except SandboxCrashed:
            return None
        finally:
            self.fleet.checkin(box)
