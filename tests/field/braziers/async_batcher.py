"""asyncio front end of an inference engine: decode lanes, batching, streaming sessions."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional, Sequence

log = logging.getLogger("serve.batcher")
EOS = 2


class LaneTable:
    """Decode lanes of the engine.  A lane is a row in every batch-wide tensor."""

    def __init__(self, n: int) -> None:
        self._free = list(range(n))
        self._avail = asyncio.Semaphore(n)

    async def enter(self) -> int:
        await self._avail.acquire()  # clean: near miss, leave() releases the permit with the lane
        return self._free.pop()

    async def enter_within(self, seconds: float) -> Optional[int]:
        until = time.monotonic() + seconds
        while self._avail.locked():
            if time.monotonic() > until:
                return None
            await asyncio.sleep(0.005)
        return await self.enter()  # clean: handed to the caller

    def leave(self, lane: int) -> None:
        self._free.append(lane)
        self._avail.release()

    @contextlib.asynccontextmanager
    async def lane(self) -> AsyncIterator[int]:
        idx = await self.enter()  # clean: left when the block ends
        try:
            yield idx
        finally:
            self.leave(idx)


class Engine:
    """Only the surface that the batcher needs."""

    def __init__(self) -> None:
        self._pos: dict[int, int] = {}

    async def prefill(self, lane: int, prompt: Sequence[int]) -> int:
        self._pos[lane] = len(prompt)
        await asyncio.sleep(0)
        return prompt[-1]

    async def decode(self, lane: int, token: int) -> int:
        self._pos[lane] += 1
        await asyncio.sleep(0)
        return (token * 31 + self._pos[lane]) % 1000


@dataclass
class Request:
    rid: int
    prompt: list[int]
    max_new: int = 64
    lane: Optional[int] = None
    out: list[int] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)


async def generate(table: LaneTable, engine: Engine, prompt: list[int], max_new: int) -> list[int]:
    lane = await table.enter()  # leak: an immediate end of sequence returns with the lane taken
    token = await engine.prefill(lane, prompt)
    if token == EOS:
        return []
    out = []
    for _ in range(max_new):
        token = await engine.decode(lane, token)
        if token == EOS:
            break
        out.append(token)
    table.leave(lane)
    return out


async def generate_scoped(table: LaneTable, engine: Engine, prompt: list[int], max_new: int) -> list[int]:
    async with table.lane() as lane:  # clean: async with block
        token = await engine.prefill(lane, prompt)
        if token == EOS:
            return []
        out = []
        while len(out) < max_new and token != EOS:
            token = await engine.decode(lane, token)
            out.append(token)
        return out


async def generate_many(table: LaneTable, engine: Engine, prompts: list[list[int]]) -> list[int]:
    lanes = await asyncio.gather(*(table.enter() for _ in prompts))  # clean: near miss, the finally leaves all
    try:
        return list(await asyncio.gather(*(engine.prefill(i, p) for i, p in zip(lanes, prompts))))
    finally:
        for lane in lanes:
            table.leave(lane)


async def hedged(table: LaneTable, engine: Engine, prompt: list[int], patience: float) -> int:
    """Start a second prefill when the first is slow; the quicker one wins."""
    lane = await table.enter()  # clean: left at the end
    first = asyncio.create_task(engine.prefill(lane, prompt))
    done, _ = await asyncio.wait({first}, timeout=patience)
    if not done:
        spare = await table.enter()  # leak: only the first lane is left
        second = asyncio.create_task(engine.prefill(spare, prompt))
        done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
    token = done.pop().result()
    table.leave(lane)
    return token


class Batcher:
    """Requests own their lane from admission until they are retired."""

    def __init__(self, table: LaneTable, engine: Engine) -> None:
        self._table = table
        self._engine = engine
        self._active: dict[int, Request] = {}
        self._tasks: set[asyncio.Task] = set()

    async def submit(self, req: Request) -> bool:
        lane = await self._table.enter_within(0.5)  # clean: near miss, in the request, left by _retire
        if lane is None:
            return False
        req.lane = lane
        self._active[lane] = req
        return True

    async def step(self) -> None:
        for req in list(self._active.values()):
            last = req.out[-1] if req.out else req.prompt[-1]
            token = await self._engine.decode(req.lane, last)
            req.out.append(token)
            if token == EOS or len(req.out) >= req.max_new:
                self._retire(req)

    def _retire(self, req: Request) -> None:
        del self._active[req.lane]
        self._table.leave(req.lane)
        req.lane = None
        req.done.set()

    async def submit_detached(self, req: Request) -> None:
        lane = await self._table.enter()  # clean: near miss, the task leaves it
        task = asyncio.create_task(self._drive(lane, req))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drive(self, lane: int, req: Request) -> None:
        try:
            token = await self._engine.prefill(lane, req.prompt)
            while len(req.out) < req.max_new and token != EOS:
                token = await self._engine.decode(lane, token)
                req.out.append(token)
        finally:
            self._table.leave(lane)
            req.done.set()

    async def warm_up(self, n: int) -> None:
        for i in range(n):
            lane = await self._table.enter()  # leak: the warm-up task never leaves its lane
            task = asyncio.create_task(self._touch(lane, i))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _touch(self, lane: int, seed: int) -> None:
        token = await self._engine.prefill(lane, [seed])
        log.debug("lane %d warmed with token %d", lane, token)


class StreamingSessions:
    """Chat sessions which keep their lane (and its cache) between turns."""

    def __init__(self, table: LaneTable, engine: Engine) -> None:
        self._table = table
        self._engine = engine
        self._lanes: dict[str, int] = {}
        self._seen: dict[str, float] = {}

    async def open(self, name: str) -> None:
        if name not in self._lanes:
            self._lanes[name] = await self._table.enter()  # leak: close and reap drop it unleft
        self._seen[name] = time.monotonic()

    async def turn(self, name: str, prompt: list[int]) -> int:
        self._seen[name] = time.monotonic()
        return await self._engine.prefill(self._lanes[name], prompt)

    def close(self, name: str) -> None:
        self._lanes.pop(name, None)
        self._seen.pop(name, None)

    def reap(self, idle: float) -> list[str]:
        now = time.monotonic()
        stale = [name for name, at in self._seen.items() if now - at > idle]
        for name in stale:
            self.close(name)
        return stale


async def stream_tokens(table: LaneTable, engine: Engine, prompt: list[int], limit: int) -> AsyncIterator[int]:
    lane = await table.enter()  # leak: the EOS return comes before the leave
    token = await engine.prefill(lane, prompt)
    for _ in range(limit):
        token = await engine.decode(lane, token)
        if token == EOS:
            return
        yield token
    table.leave(lane)


class PlanCell:
    """A batch plan rebuilt at most once at a time."""

    def __init__(self) -> None:
        self._guard = asyncio.Lock()
        self._dirty = True
        self.plan: list[int] = []

    async def rebuild(self, reqs: Sequence[Request]) -> list[int]:
        await self._guard.acquire()  # leak: an up-to-date plan is returned with the lock held
        if not self._dirty:
            return self.plan
        self.plan = [r.rid for r in sorted(reqs, key=lambda r: len(r.prompt))]
        self._dirty = False
        self._guard.release()
        return self.plan

    async def invalidate(self) -> None:
        await self._guard.acquire()  # clean: released by the finally
        try:
            if self._dirty:
                return
            self._dirty = True
            self.plan = []
        finally:
            self._guard.release()
