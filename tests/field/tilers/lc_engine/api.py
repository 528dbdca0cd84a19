from __future__ import annotations

import asyncio
import logging
from typing import AsyncIterator, List, Optional, Sequence, Set

from .kv import KVManager, KVSpan
from .request import GenRequest

log = logging.getLogger(__name__)


async def run_model(prompt: Sequence[int], span: KVSpan, n: int) -> List[int]:
    await asyncio.sleep(0)
    return [sum(prompt) + len(span)] * n


class LongContextService:
    def __init__(self, mgr: KVManager) -> None:
        self.mgr = mgr
        self._tasks: Set[asyncio.Task] = set()

    async def generate(self, req: GenRequest, timeout: float) -> Optional[List[int]]:
        span = await self.mgr.claim_wait(req.pages_needed())  # leak: a timeout is answered with None and the span kept
        try:
            out = await asyncio.wait_for(run_model(req.prompt, span, req.max_new), timeout)
        except asyncio.TimeoutError:
            log.warning("request %d timed out", req.rid)
            return None
        self.mgr.relinquish(span)
        return out

    async def generate_safe(self, req: GenRequest, timeout: float) -> Optional[List[int]]:
        span = await self.mgr.claim_wait(req.pages_needed())  # clean: near miss, the timeout's return passes through finally
        try:
            return await asyncio.wait_for(run_model(req.prompt, span, req.max_new), timeout)
        except asyncio.TimeoutError:
            return None
        finally:
            self.mgr.relinquish(span)

    async def _serve(self, req: GenRequest, span: KVSpan) -> None:
        try:
            req.output = await run_model(req.prompt, span, req.max_new)
        finally:
            self.mgr.relinquish(span)

    async def _score(self, req: GenRequest, span: KVSpan) -> None:
        req.output = await run_model(req.prompt, span, 1)

    def _spawn(self, coro) -> asyncio.Task:
        task = asyncio.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def start(self, req: GenRequest) -> asyncio.Task:
        span = await self.mgr.claim_wait(req.pages_needed())  # clean: near miss, the task relinquishes it
        return self._spawn(self._serve(req, span))

    async def start_scoring(self, req: GenRequest) -> asyncio.Task:
        span = await self.mgr.claim_wait(req.pages_needed())  # leak: the task only reads it and nobody relinquishes
        return self._spawn(self._score(req, span))

    async def start_scoring_tracked(self, req: GenRequest) -> asyncio.Task:
        span = await self.mgr.claim_wait(req.pages_needed())  # clean: near miss, the task's done callback relinquishes
        task = self._spawn(self._score(req, span))
        task.add_done_callback(lambda _t: self.mgr.relinquish(span))
        return task

    async def batch(self, reqs: Sequence[GenRequest]) -> List[List[int]]:
        spans: List[KVSpan] = []
        try:
            for req in reqs:
                spans.append(await self.mgr.claim_wait(req.pages_needed()))  # clean: all relinquished in finally
            return await asyncio.gather(*(run_model(r.prompt, s, r.max_new) for r, s in zip(reqs, spans)))
        finally:
            for span in spans:
                self.mgr.relinquish(span)

    async def stream(self, req: GenRequest) -> AsyncIterator[int]:
        span = self.mgr.claim(req.pages_needed())  # leak: a stop token returns before the relinquish
        if span is None:
            return
        for tok in await run_model(req.prompt, span, req.max_new):
            if tok == 0:
                return
            yield tok
        self.mgr.relinquish(span)

    async def best_of(self, req: GenRequest, n: int) -> Optional[List[int]]:
        best: Optional[List[int]] = None
        for _ in range(n):
            span = self.mgr.claim(req.pages_needed())  # clean: near miss, break only for None, relinquished otherwise
            if span is None:
                break
            out = await run_model(req.prompt, span, req.max_new)
            self.mgr.relinquish(span)
            if best is None or sum(out) > sum(best):
                best = out
        return best
