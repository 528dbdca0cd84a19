"""Rollout worker: generates with the newest weights that have fully arrived."""
from __future__ import annotations

import asyncio
import logging
from typing import Callable, Optional

from .buffers import SyncBuffer, SyncBufferPool

log = logging.getLogger("rollout.worker")


class RolloutWorker:
    def __init__(self, pool: SyncBufferPool, generate: Callable[[str, int], str], max_inflight: int = 8) -> None:
        self.pool = pool
        self.generate = generate
        self.gate = asyncio.Semaphore(max_inflight)
        self.version = 0
        self._shadow: dict[str, SyncBuffer] = {}
        self._live: dict[str, SyncBuffer] = {}

    async def receive(self, name: str, raw: bytes, version: int) -> None:
        buf = await self.pool.rent()  # leak: a shard of an older version is ignored with its buffer rented
        if version < self.version:
            log.info("stale shard %s v%d", name, version)
            return
        buf.data[:len(raw)] = raw
        buf.used = len(raw)
        prev = self._shadow.pop(name, None)
        if prev is not None:
            self.pool.unrent(prev)
        self._shadow[name] = buf

    def flip(self, version: int) -> None:
        """Make the shadow weights live."""
        for name, buf in self._shadow.items():
            old = self._live.get(name)
            if old is not None:
                self.pool.unrent(old)
            self._live[name] = buf
        self._shadow = {}
        self.version = version

    async def sample(self, prompt: str) -> Optional[str]:
        await self.gate.acquire()  # leak: an empty prompt returns without release
        if not prompt:
            return None
        try:
            await asyncio.sleep(0)
            return self.generate(prompt, self.version)
        finally:
            self.gate.release()

    async def sample_group(self, prompt: str, n: int) -> list[str]:
        out: list[str] = []
        for _ in range(n):
            await self.gate.acquire()  # clean: near miss, the `break` comes after the release
            try:
                text = self.generate(prompt, self.version)
            finally:
                self.gate.release()
            if text.endswith("</s>"):
                break
            out.append(text)
        return out

    async def scratch_eval(self, prompt: str) -> int:
        async with self.pool.rented() as buf:  # clean: async context manager
            text = self.generate(prompt, self.version).encode()
            if len(text) > len(buf.data):
                return -1
            buf.data[:len(text)] = text
            return sum(buf.data[:len(text)]) % 251

    def shutdown(self) -> None:
        for table in (self._shadow, self._live):
            while table:
                _, buf = table.popitem()
                self.pool.unrent(buf)
