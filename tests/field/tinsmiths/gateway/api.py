from __future__ import annotations

import asyncio
import logging
from typing import Any, Dict

from .quota import KeyQuota, QuotaExceeded
from .tracker import GrantScope, GrantTracker

log = logging.getLogger(__name__)


class Api:
    def __init__(self, quota: KeyQuota, engine: Any) -> None:
        self.quota = quota
        self.engine = engine
        self.tracker = GrantTracker(quota)

    async def complete(self, key: str, body: Dict[str, Any]) -> Dict[str, Any]:
        async with GrantScope(self.quota, key, body.get("n", 1)):  # clean: a context manager
            if body.get("echo"):
                return {"text": body["prompt"]}
            return await self.engine.run(body)

    async def start_stream(self, sid: str, key: str, body: Dict[str, Any]) -> bool:
        grant = await self.quota.obtain_polite(key, 1)  # leak: not restored when the stream id is bound already
        if not self.tracker.bind(sid, grant):
            return False
        await self.engine.start(sid, body, on_close=self.tracker.done)
        return True

    async def start_or_join(self, sid: str, key: str, body: Dict[str, Any]) -> bool:
        grant = await self.quota.obtain_polite(key, 1)  # clean: near miss, restored when bind() refuses, else by done()
        if not self.tracker.bind(sid, grant):
            self.quota.restore(grant)
            return await self.engine.join(sid)
        await self.engine.start(sid, body, on_close=self.tracker.done)
        return True

    async def tokenize(self, key: str, text: str) -> Dict[str, Any]:
        try:
            grant = await self.quota.obtain_polite(key, 1)  # leak: the timeout's answer leaves the grant out
        except QuotaExceeded:
            return {"error": 429}
        try:
            ids = await asyncio.wait_for(self.engine.tokenize(text), 1.0)
        except asyncio.TimeoutError:
            log.warning("tokenize timed out")
            return {"error": 504}
        self.quota.restore(grant)
        return {"ids": ids}

    async def rerank(self, key: str, docs: list) -> list:
        grant = await self.quota.obtain_polite(key, len(docs))  # clean: restored in finally
        try:
            return await self.engine.rerank(docs)
        finally:
            self.quota.restore(grant)

    async def upgrade(self, sid: str, key: str, units: int) -> bool:
        """Replace a stream's grant by a larger one."""
        bigger = await self.quota.obtain_polite(key, units)  # leak: a stream that ended meanwhile returns False with it
        old = self.tracker.unbind(sid)
        if old is None:
            return False
        self.quota.restore(old)
        self.tracker.bind(sid, bigger)
        return True
