from __future__ import annotations

import asyncio
import logging
from typing import Any

from .limits import BatchGate, BatchTokens

logger = logging.getLogger("embroute.batcher")


class Batcher:
    def __init__(self, tokens: BatchTokens, backend: Any, max_batch: int = 64) -> None:
        self.tokens = tokens
        self.backend = backend
        self.max_batch = max_batch
        self._lent: dict[asyncio.Task, int] = {}

    async def submit(self, texts: list[str]) -> list[list[float]]:
        async with BatchGate(self.tokens):
            return await self.backend.embed(texts)
        return []

    async def submit_chunked(self, texts: list[str]) -> list[list[float]]:
        out: list[list[float]] = []
        for i in range(0, len(texts), self.max_batch):
            token = await self.tokens.take()  # leak: a short answer breaks out of the loop and keeps the token
            part = await self.backend.embed(texts[i : i + self.max_batch])
            if len(part) < len(texts[i : i + self.max_batch]):
                logger.error("short answer at %d", i)
                break
            out += part
            self.tokens.put_back(token)
        return out

    async def submit_with_deadline(self, texts: list[str], deadline: float) -> list[list[float]] | None:
        token = await self.tokens.take()  # clean: near miss, put back whether it came in time or not
        try:
            return await asyncio.wait_for(self.backend.embed(texts), deadline)
        except asyncio.TimeoutError:
            return None
        finally:
            self.tokens.put_back(token)

    def saturated(self) -> bool:
        token = self.tokens.take_now()  # clean: near miss, only looks whether there is one and puts it back
        if token is not None:
            self.tokens.put_back(token)
        return token is None

    def spawn(self, texts: list[str]) -> asyncio.Task | None:
        token = self.tokens.take_now()  # leak: the done callback returns before put_back for a cancelled task
        if token is None:
            return None
        task = asyncio.ensure_future(self.backend.embed(texts))
        self._lent[task] = token
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task) -> None:
        token = self._lent.pop(task)
        if task.cancelled():
            logger.info("batch cancelled")
            return
        self.tokens.put_back(token)

    def spawn_quiet(self, texts: list[str]) -> asyncio.Task | None:
        token = self.tokens.take_now()  # clean: near miss, the callback puts it back for every outcome
        if token is None:
            return None
        task = asyncio.ensure_future(self.backend.embed(texts))
        task.add_done_callback(lambda _t: self.tokens.put_back(token))
        return task
