from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Awaitable, Callable

log = logging.getLogger("evalfarm.sandbox")

JAIL = [sys.executable, "-I", "-m", "jail"]


class BootError(Exception):
    pass


class SandboxDied(Exception):
    pass


@dataclass
class Outcome:
    ok: bool
    stdout: str = ""
    error: str = ""
    compile_error: bool = False


class Sandbox:
    def __init__(self, proc: asyncio.subprocess.Process, language: str) -> None:
        self.proc = proc
        self.language = language
        self.born = time.monotonic()
        self.runs = 0

    async def _ask(self, **message) -> dict:
        self.proc.stdin.write(json.dumps(message).encode() + b"\n")
        line = await self.proc.stdout.readline()
        if not line:
            raise SandboxDied(f"pid {self.proc.pid} after {self.runs} runs")
        return json.loads(line)

    async def run(self, code: str, stdin: str = "") -> Outcome:
        self.runs += 1
        return Outcome(**await self._ask(op="run", code=code, stdin=stdin))

    async def scrub(self) -> bool:
        """Remove what the last program left; False when that is not possible."""
        try:
            return bool((await self._ask(op="scrub")).get("clean"))
        except SandboxDied:
            return False

    async def destroy(self) -> None:
        if self.proc.returncode is None:
            self.proc.kill()
        await self.proc.wait()


async def boot(language: str) -> Sandbox:
    pipe = asyncio.subprocess.PIPE
    proc = await asyncio.create_subprocess_exec(*JAIL, language, stdin=pipe, stdout=pipe)  # leak: a jail that reports anything but ready raises BootError and keeps running
    banner = await proc.stdout.readline()
    if banner.strip() != b"ready":
        raise BootError(f"{language}: {banner!r}")
    return Sandbox(proc, language)


class SandboxPool:
    """At most `limit` sandboxes of one language, reused after a scrub."""

    def __init__(self, language: str, limit: int, booter: Callable[[str], Awaitable[Sandbox]] = boot, max_age: float = 600.0) -> None:
        self.language = language
        self.max_age = max_age
        self._boot = booter
        self._permits = asyncio.Semaphore(limit)
        self._ready: list[Sandbox] = []
        self._closed = False

    async def borrow(self) -> Sandbox:
        await self._permits.acquire()  # clean: near miss, stays with the sandbox, give_back and discard release it, and so does a failed boot
        while self._ready:
            box = self._ready.pop()  # clean: one that is too old is destroyed, another goes to the caller
            if time.monotonic() - box.born < self.max_age:
                return box
            await box.destroy()
        try:
            return await self._boot(self.language)  # clean: the caller's
        except BootError:
            self._permits.release()
            raise

    async def give_back(self, box: Sandbox) -> None:
        try:
            if not self._closed and await box.scrub():
                self._ready.append(box)
            else:
                await box.destroy()
        finally:
            self._permits.release()

    async def discard(self, box: Sandbox) -> None:
        try:
            await box.destroy()
        finally:
            self._permits.release()

    @asynccontextmanager
    async def session(self):
        box = await self.borrow()  # clean: near miss, discarded when it died or the body was cancelled, given back otherwise
        sound = False
        try:
            yield box
            sound = True
        finally:
            await (self.give_back(box) if sound else self.discard(box))

    async def aclose(self) -> None:
        self._closed = True
        while self._ready:
            await self._ready.pop().destroy()  # clean: destroyed at once
