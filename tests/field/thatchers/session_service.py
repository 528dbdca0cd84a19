"""Experiment session service: remote kernels, run permits and per-user quotas."""
from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable, Optional

logger = logging.getLogger("sessions")


@dataclass
class Kernel:
    kid: str
    state: dict[str, Any] = field(default_factory=dict)
    broken: bool = False


class KernelPool:
    def __init__(self, size: int):
        self._idle: asyncio.Queue[Kernel] = asyncio.Queue()
        for _ in range(size):
            self._idle.put_nowait(Kernel(uuid.uuid4().hex[:8]))

    async def lease(self) -> Kernel:
        return await self._idle.get()

    def lease_nowait(self) -> Optional[Kernel]:
        try:
            return self._idle.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def retire(self, kernel: Kernel) -> None:
        if kernel.broken:
            kernel = Kernel(uuid.uuid4().hex[:8])
        kernel.state.clear()
        self._idle.put_nowait(kernel)


class Quota:
    def __init__(self, per_user: int):
        self.per_user = per_user
        self.used: dict[str, int] = {}

    def charge(self, user: str) -> bool:
        n = self.used.get(user, 0)
        if n >= self.per_user:
            return False
        self.used[user] = n + 1
        return True

    def refund(self, user: str) -> None:
        self.used[user] -= 1
        if not self.used[user]:
            del self.used[user]


@dataclass
class Session:
    sid: str
    user: str
    kernel: Optional[Kernel]
    runs: int = 0


RunFn = Callable[[Kernel, str], Awaitable[Any]]


class SessionService:
    def __init__(self, kernels: KernelPool, quota: Quota, run: RunFn):
        self.kernels = kernels
        self.quota = quota
        self.run = run
        self.sessions: dict[str, Session] = {}
        self.warm: dict[str, Kernel] = {}
        self.background: set[asyncio.Task] = set()

    async def open_session(self, user: str) -> Optional[str]:
        if not self.quota.charge(user):  # leak: expire_idle() ends a session without a refund
            return None
        kernel = self.warm.pop(user, None)
        if kernel is None:
            kernel = await self.kernels.lease()  # clean: near miss, close_session() and expire_idle() retire it
        sid = uuid.uuid4().hex
        self.sessions[sid] = Session(sid, user, kernel)
        return sid

    def close_session(self, sid: str) -> bool:
        s = self.sessions.pop(sid, None)
        if s is None:
            return False
        if s.kernel is not None:
            self.kernels.retire(s.kernel)
        self.quota.refund(s.user)
        return True

    def expire_idle(self, min_runs: int) -> int:
        stale = [s for s in self.sessions.values() if s.runs < min_runs]
        for s in stale:
            del self.sessions[s.sid]
            if s.kernel is not None:
                self.kernels.retire(s.kernel)
        return len(stale)

    def prewarm(self, user: str) -> bool:
        kernel = self.kernels.lease_nowait()  # leak: a user who already has a warm kernel returns early
        if kernel is None:
            return False
        if user in self.warm:
            return True
        self.warm[user] = kernel
        return True

    def cool_down(self) -> None:
        for user in list(self.warm):
            self.kernels.retire(self.warm.pop(user))

    async def execute(self, sid: str, code: str) -> Any:
        s = self.sessions.get(sid)
        if s is None or s.kernel is None:
            return None
        s.runs += 1
        try:
            return await self.run(s.kernel, code)
        except ConnectionError:
            s.kernel.broken = True
            return None

    async def restart_kernel(self, sid: str) -> bool:
        s = self.sessions.get(sid)
        if s is None:
            return False
        s.kernel = await self.kernels.lease()  # leak: the former kernel of the session is overwritten, never retired
        return True

    async def swap_broken(self, sid: str) -> bool:
        s = self.sessions.get(sid)
        if s is None or s.kernel is None or not s.kernel.broken:
            return False
        bad, s.kernel = s.kernel, None
        self.kernels.retire(bad)
        s.kernel = self.kernels.lease_nowait()  # clean: near miss, the broken one was retired before the field is set
        return True

    async def run_detached(self, user: str, code: str) -> bool:
        if not self.quota.charge(user):  # clean: near miss, the done callback refunds also upon cancellation
            return False
        kernel = self.kernels.lease_nowait()  # clean: retired by the done callback
        if kernel is None:
            self.quota.refund(user)
            return False

        async def body() -> None:
            try:
                await self.run(kernel, code)
            except ConnectionError:
                kernel.broken = True

        def done(task: asyncio.Task) -> None:
            self.background.discard(task)
            self.kernels.retire(kernel)
            self.quota.refund(user)

        task = asyncio.create_task(body())
        self.background.add(task)
        task.add_done_callback(done)
        return True

    async def run_once(self, user: str, code: str, timeout: float) -> Any:
        if not self.quota.charge(user):  # leak: without an idle kernel the charge is kept
            return None
        kernel = self.kernels.lease_nowait()  # clean: near miss, the finally covers the timeout too
        if kernel is None:
            return None
        try:
            return await asyncio.wait_for(self.run(kernel, code), timeout)
        except asyncio.TimeoutError:
            kernel.broken = True
            return None
        finally:
            self.kernels.retire(kernel)
            self.quota.refund(user)

    async def run_cells(self, cells: list[str]) -> list[Any]:
        kernel = await self.kernels.lease()  # leak: a cancelled request is answered with the partial list, kernel not retired
        out: list[Any] = []
        try:
            for cell in cells:
                out.append(await self.run(kernel, cell))
        except asyncio.CancelledError:
            logger.info("cancelled after %d cells", len(out))
            return out
        self.kernels.retire(kernel)
        return out

    async def stream_cells(self, cells: list[str]) -> AsyncIterator[Any]:
        kernel = await self.kernels.lease()  # clean: near miss, finally covers the break at None and a closed generator
        try:
            for cell in cells:
                value = await self.run(kernel, cell)
                if value is None:
                    break
                yield value
        finally:
            self.kernels.retire(kernel)

    async def fan_out(self, code: str, width: int) -> list[Any]:
        held: list[Kernel] = []
        while len(held) < width:
            kernel = self.kernels.lease_nowait()  # clean: near miss, whatever was had is retired after the gather
            if kernel is None:
                break
            held.append(kernel)
        results = await asyncio.gather(*(self.run(k, code) for k in held), return_exceptions=True)
        for k in held:
            self.kernels.retire(k)
        return [r for r in results if not isinstance(r, BaseException)]
