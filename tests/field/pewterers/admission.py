"""Admission control for the ranking endpoint (asyncio)."""
from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any, Awaitable, Callable, Dict, List, Optional, Sequence, Set

log = logging.getLogger(__name__)


class BackendError(Exception):
    pass


class Gate:
    """Concurrency permits; cheap calls poll, expensive ones queue."""

    def __init__(self, permits: int) -> None:
        self._permits = permits
        self._cond = asyncio.Condition()

    def try_enter(self) -> bool:
        if self._permits == 0:
            return False
        self._permits -= 1
        return True

    async def enter(self) -> None:
        async with self._cond:
            await self._cond.wait_for(lambda: self._permits > 0)
            self._permits -= 1

    def leave(self) -> None:
        self._permits += 1
        asyncio.ensure_future(self._wake())

    async def _wake(self) -> None:
        async with self._cond:
            self._cond.notify()

    @property
    def permits(self) -> int:
        return self._permits


Handler = Callable[[Dict[str, Any]], Awaitable[Any]]


def limited(gate: Gate) -> Callable[[Handler], Handler]:
    def wrap(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def inner(request: Dict[str, Any]) -> Any:
            await gate.enter()  # clean: left in finally
            try:
                return await handler(request)
            finally:
                gate.leave()
        return inner
    return wrap


class RankingEndpoint:
    def __init__(self, gate: Gate, score: Handler) -> None:
        self.gate = gate
        self.score = score
        self.shed = 0
        self._tasks: Set[asyncio.Task] = set()
        self._results: Dict[str, Any] = {}

    async def rank(self, request: Dict[str, Any]) -> Optional[Any]:
        if not self.gate.try_enter():  # clean: near miss, the refused branch holds nothing, finally leaves
            self.shed += 1
            return None
        try:
            return await self.score(request)
        finally:
            self.gate.leave()

    async def rank_cached(self, request: Dict[str, Any]) -> Optional[Any]:
        if not self.gate.try_enter():  # leak: the cached answer is returned without leave
            self.shed += 1
            return None
        cached = self._results.get(request["user"])
        if cached is not None:
            return cached
        try:
            result = await self.score(request)
            self._results[request["user"]] = result
            return result
        finally:
            self.gate.leave()

    async def rank_batch(self, requests: Sequence[Dict[str, Any]]) -> List[Any]:
        out: List[Any] = []
        for request in requests:
            await self.gate.enter()  # leak: continue for a request without candidates
            if not request.get("candidates"):
                out.append(None)
                continue
            out.append(await self.score(request))
            self.gate.leave()
        return out

    async def rank_guarded(self, request: Dict[str, Any]) -> Any:
        await self.gate.enter()  # leak: BackendError is answered with the fallback, leave skipped
        try:
            result = await self.score(request)
        except BackendError:
            log.warning("falling back for %s", request["user"])
            return request.get("fallback")
        self.gate.leave()
        return result

    def spawn(self, request: Dict[str, Any]) -> bool:
        if not self.gate.try_enter():  # clean: near miss, the task's done callback leaves
            return False
        task = asyncio.ensure_future(self.score(request))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return True

    def _on_done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self.gate.leave()
        if not task.cancelled() and task.exception() is not None:
            log.error("background rank failed: %r", task.exception())

    def spawn_refresh(self, request: Dict[str, Any]) -> bool:
        if not self.gate.try_enter():  # leak: the callback leaves only when the task ended well
            return False
        task = asyncio.ensure_future(self.score(request))
        self._tasks.add(task)

        def finished(t: asyncio.Task) -> None:
            self._tasks.discard(t)
            if t.cancelled() or t.exception() is not None:
                return
            self._results[request["user"]] = t.result()
            self.gate.leave()

        task.add_done_callback(finished)
        return True

    async def hedge(self, request: Dict[str, Any]) -> Any:
        """Second attempt only if there is spare capacity."""
        await self.gate.enter()  # clean: left in the outer finally
        try:
            try:
                return await self.score(request)
            except BackendError:
                pass
            spare = self.gate.try_enter()  # clean: near miss, left under the same flag
            try:
                return await self.score(request)
            finally:
                if spare:
                    self.gate.leave()
        finally:
            self.gate.leave()

    async def warm(self, users: Sequence[str]) -> int:
        """Uses what capacity is idle, in two-permit steps."""
        warmed = 0
        for user in users:
            if not self.gate.try_enter():  # leak: break when the second permit is refused keeps the first
                break
            if not self.gate.try_enter():  # clean: left after both scores
                break
            try:
                self._results[user] = await self.score({"user": user, "candidates": [1]})
                warmed += 1
            finally:
                self.gate.leave()
                self.gate.leave()
        return warmed

    async def close(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))
