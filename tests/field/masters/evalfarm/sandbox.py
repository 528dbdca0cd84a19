"""Sandbox processes. The queue holds idle ones, and None for every one that is not started yet."""
from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager

log = logging.getLogger("evalfarm.sandbox")


class SandboxError(RuntimeError):
    pass


class Sandbox:
    def __init__(self, proc: asyncio.subprocess.Process):
        self.proc, self.tainted, self.runs = proc, False, 0

    def healthy(self) -> bool:
        return not self.tainted and self.proc.returncode is None and self.runs < 200

    async def execute(self, code: str, timeout: float) -> dict:
        self.runs += 1
        self.proc.stdin.write(json.dumps({"code": code, "timeout": timeout}).encode() + b"\n")
        await self.proc.stdin.drain()
        try:
            line = await asyncio.wait_for(self.proc.stdout.readline(), timeout + 5)
        except asyncio.TimeoutError:
            self.tainted = True
            return {"ok": False, "error": "timeout"}
        return json.loads(line or b'{"ok": false, "error": "died"}')

    def kill(self) -> None:
        if self.proc.returncode is None:
            self.proc.kill()


class SandboxPool:
    def __init__(self, cmd: list[str], n: int):
        self.cmd, self.n = cmd, n
        self._idle: asyncio.Queue[Sandbox | None] = asyncio.Queue()
        for _ in range(n):
            self._idle.put_nowait(None)

    async def _start(self) -> Sandbox:
        proc = await asyncio.create_subprocess_exec(  # clean: near miss, killed if it does not greet, else the sandbox has it
            *self.cmd, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        if await proc.stdout.readline() != b"ready\n":
            proc.kill()
            raise SandboxError(f"{self.cmd[0]} does not start")
        return Sandbox(proc)

    async def acquire(self) -> Sandbox:
        box = await self._idle.get()  # leak: if the replacement does not start, SandboxError leaves and the place is not put back
        if box is not None and box.healthy():
            return box
        if box is not None:
            box.kill()
        return await self._start()  # clean: returned

    def release(self, box: Sandbox) -> None:
        if box.healthy():
            self._idle.put_nowait(box)
        else:
            box.kill()
            self._idle.put_nowait(None)

    @asynccontextmanager
    async def lease(self):
        box = await self.acquire()  # clean: released in the finally
        try:
            yield box
        finally:
            self.release(box)

    async def close(self) -> None:
        for _ in range(self.n):
            box = await self._idle.get()  # clean: the pool ends here, the processes are killed
            if box is not None:
                box.kill()
