"""Sandboxes for model-written code."""
from __future__ import annotations

import asyncio
from typing import Dict, List, Optional


class SandboxDead(RuntimeError):
    pass


class Sandbox:
    def __init__(self, name: str):
        self.name = name
        self.runs = 0
        self.healthy = True

    async def run(self, source: str) -> str:
        self.runs += 1
        await asyncio.sleep(0)
        if "exit" in source:
            raise SandboxDead(self.name)
        return source.upper()


class SandboxPool:
    def __init__(self, count: int):
        self._idle: List[Sandbox] = [Sandbox(f"sb{i}") for i in range(count)]
        self._busy: Dict[str, Sandbox] = {}

    def checkout(self) -> Optional[Sandbox]:
        if not self._idle:
            return None
        sb = self._idle.pop()
        self._busy[sb.name] = sb
        return sb

    def checkin(self, sb: Sandbox) -> None:
        self._busy.pop(sb.name)
        self._idle.append(sb)

    async def checkout_healthy(self, attempts: int = 3) -> Optional[Sandbox]:
        for _ in range(attempts):
            sb = self.checkout()  # leak: an unhealthy sandbox is left checked out and the next one tried
            if sb is None:
                await asyncio.sleep(0.01)
                continue
            if sb.healthy:
                return sb
        return None

    async def checkout_wait(self, attempts: int = 50) -> Optional[Sandbox]:
        for _ in range(attempts):
            sb = self.checkout()  # clean: near miss, only a failed attempt goes round again
            if sb is not None:
                return sb
            await asyncio.sleep(0.01)
        return None
