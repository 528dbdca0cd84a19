from __future__ import annotations

import time
from typing import AsyncIterator, Optional, TextIO

from .engine import Engine
from .request import Request


class Server:
    def __init__(self, engine: Engine, log_path: str) -> None:
        self.engine = engine
        self.log_path = log_path
        self.sessions: dict[str, tuple[int, float]] = {}
        self._access: TextIO = open(log_path, "a")  # clean: closed by stop or by reopen_log

    def reopen_log(self) -> None:
        """After logrotate moved the file away."""
        self._access.close()
        self._access = open(self.log_path, "a")  # clean: near miss, the old handle was closed

    def stop(self) -> None:
        for slot, _ in self.sessions.values():
            self.engine.slots.give_back(slot)
        self.sessions.clear()
        self._access.close()

    def open_session(self, sid: str) -> bool:
        if sid in self.sessions:
            return True
        slot = self.engine.slots.try_lease()  # clean: kept by session, given back by expire or stop
        if slot is None:
            return False
        self.sessions[sid] = (slot, time.monotonic())
        return True

    def expire(self, max_age: float) -> int:
        now = time.monotonic()
        stale = [s for s, (_, t) in self.sessions.items() if now - t > max_age]
        for sid in stale:
            slot, _ = self.sessions.pop(sid)
            self.engine.slots.give_back(slot)
        return len(stale)

    async def stream(self, rid: str, prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
        req = Request(rid, prompt, max_tokens)
        req.attach(await self.engine.slots.lease())  # clean: near miss, moved into the request, retired in finally
        try:
            yield await self.engine.model.prefill(req.slot, prompt)
            while not req.finished:
                tok = await self.engine.model.decode(req.slot)
                req.output.append(tok)
                yield tok
        finally:
            self.engine.retire(req)

    async def complete(self, rid: str, prompt: list[int], stop_token: Optional[int] = None) -> list[int]:
        req = Request(rid, prompt)
        req.attach(await self.engine.slots.lease())  # leak: the stop token returns before the request is retired
        await self.engine.model.prefill(req.slot, prompt)
        while not req.finished:
            tok = await self.engine.model.decode(req.slot)
            if tok == stop_token:
                return req.output
            req.output.append(tok)
        self.engine.retire(req)
        self._access.write(f"{rid} {len(req.output)}\n")
        return req.output
