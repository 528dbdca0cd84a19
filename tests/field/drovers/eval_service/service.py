"""Request side of the evaluation service."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

from .permits import PermitGate
from .sandbox import Sandbox, SandboxDead, SandboxPool

log = logging.getLogger("eval")


@dataclass
class Session:
    ident: str
    sandbox: Sandbox
    history: List[str] = field(default_factory=list)


class EvalService:
    def __init__(self, sandboxes: int = 4, permits: int = 8):
        self.pool = SandboxPool(sandboxes)
        self.gate = PermitGate(permits)
        self.sessions: Dict[str, Session] = {}
        self.jobs: Dict[str, Tuple[asyncio.Task, Sandbox]] = {}

    async def open_session(self, ident: str) -> bool:
        if ident in self.sessions:
            return True
        sb = await self.pool.checkout_wait()  # clean: near miss, moves into the session, close_session checks it in
        if sb is None:
            return False
        other = self.sessions.get(ident)
        if other is not None:
            self.pool.checkin(sb)
            return True
        self.sessions[ident] = Session(ident, sb)
        return True

    def close_session(self, ident: str) -> None:
        session = self.sessions.pop(ident, None)
        if session is not None:
            self.pool.checkin(session.sandbox)

    async def turn(self, ident: str, source: str) -> str:
        session = self.sessions[ident]
        async with self.gate.permit_if(len(session.history) > 0):  # clean: async with
            session.history.append(source)
            return await session.sandbox.run(source)

    async def submit(self, job: str, source: str) -> bool:
        """Starts a detached run; ``collect`` or ``cancel`` ends it."""
        if job in self.jobs:
            return False
        sb = self.pool.checkout()  # leak: cancel drops the entry without checking the sandbox in
        if sb is None:
            return False
        self.jobs[job] = (asyncio.create_task(sb.run(source)), sb)
        return True

    async def collect(self, job: str) -> Optional[str]:
        task, sb = self.jobs.pop(job)
        try:
            return await task
        except SandboxDead:
            return None
        finally:
            self.pool.checkin(sb)

    def cancel(self, job: str) -> bool:
        entry = self.jobs.pop(job, None)
        if entry is None:
            return False
        task, _ = entry
        return task.cancel()

    def fire(self, source: str) -> Optional[asyncio.Task]:
        sb = self.pool.checkout()  # clean: near miss, the task's done callback checks it in however it ends
        if sb is None:
            return None
        task = asyncio.create_task(sb.run(source))
        task.add_done_callback(lambda _t, sb=sb: self.pool.checkin(sb))
        return task

    async def run_batch(self, sources: List[str]) -> List[str]:
        out: List[str] = []
        for src in sources:
            await self.gate.take()  # leak: an empty source continues without giving
            if not src.strip():
                out.append("")
                continue
            sb = await self.pool.checkout_wait()  # leak: a dead sandbox is survived and never checked in
            if sb is None:
                self.gate.give()
                break
            try:
                out.append(await sb.run(src))
            except SandboxDead as err:
                log.warning("%s died", err)
                self.gate.give()
                continue
            self.pool.checkin(sb)
            self.gate.give()
        return out

    async def run_timed(self, source: str, limit: float) -> Optional[str]:
        sb = await self.pool.checkout_healthy()  # leak: the timeout returns without a checkin
        if sb is None:
            return None
        try:
            result = await asyncio.wait_for(sb.run(source), limit)
        except asyncio.TimeoutError:
            sb.healthy = False
            return None
        self.pool.checkin(sb)
        return result
