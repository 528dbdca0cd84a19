"""Rollout workers of the RL loop: sequence slots, sandboxes, generation permits."""
from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

log = logging.getLogger(__name__)


class SequenceSlots:
    """Decoder slots. reserve() gives None when the engine is full."""

    def __init__(self, count: int):
        self._free: Deque[int] = deque(range(count))

    def reserve(self) -> Optional[int]:
        return self._free.popleft() if self._free else None

    def cancel(self, slot: int) -> None:
        self._free.append(slot)


class SandboxPool:
    def __init__(self, factory, limit: int):
        self._factory = factory
        self._idle: List[object] = []
        self._sem = asyncio.Semaphore(limit)

    async def borrow(self):
        await self._sem.acquire()
        return self._idle.pop() if self._idle else self._factory()

    def give(self, box) -> None:
        self._idle.append(box)
        self._sem.release()


@dataclass
class Episode:
    uid: int
    prompt: List[int]
    slot: Optional[int] = None
    box: Optional[object] = None
    turns: int = 0
    state: str = "new"
    tokens: List[int] = field(default_factory=list)


class RolloutWorker:
    def __init__(self, slots: SequenceSlots, boxes: SandboxPool, engine):
        self.slots = slots
        self.boxes = boxes
        self.engine = engine
        self.active: Dict[int, Episode] = {}

    async def start(self, ep: Episode) -> bool:
        ep.slot = self.slots.reserve()  # clean: ends in finish and in abort, uid is unique (by meaning)
        if ep.slot is None:
            return False
        ep.box = await self.boxes.borrow()  # leak: abort cancels the slot and forgets the sandbox
        ep.state = "running"
        self.active[ep.uid] = ep
        return True

    def finish(self, uid: int) -> List[int]:
        ep = self.active.pop(uid)
        self.slots.cancel(ep.slot)
        self.boxes.give(ep.box)
        ep.state = "done"
        return ep.tokens

    def abort(self, uid: int) -> None:
        ep = self.active.pop(uid, None)
        if ep is None:
            return
        self.engine.stop(ep.slot)
        self.slots.cancel(ep.slot)
        ep.state = "aborted"


class GroupSampler:
    """Samples n answers for one prompt, all or none."""

    def __init__(self, slots: SequenceSlots):
        self.slots = slots
        self.groups: Dict[int, List[int]] = {}

    def open_group(self, gid: int, n: int) -> bool:
        if gid in self.groups:
            return True
        got: List[int] = []
        for _ in range(n):
            slot = self.slots.reserve()  # leak: when the engine gets full midway the ones got are dropped
            if slot is None:
                return False
            got.append(slot)
        self.groups[gid] = got
        return True

    def open_group_atomic(self, gid: int, n: int) -> bool:
        if gid in self.groups:
            return True
        got: List[int] = []
        while len(got) < n:
            slot = self.slots.reserve()  # clean: near miss, the short group gives all back
            if slot is None:
                break
            got.append(slot)
        if len(got) < n:
            for slot in got:
                self.slots.cancel(slot)
            return False
        self.groups[gid] = got
        return True

    def close_group(self, gid: int) -> None:
        for slot in self.groups.pop(gid, ()):
            self.slots.cancel(slot)


class MultiTurnDriver:
    """Tool turns: a sandbox is borrowed for an episode and used over all turns."""

    def __init__(self, boxes: SandboxPool, policy):
        self.boxes = boxes
        self.policy = policy
        self.by_uid: Dict[int, object] = {}

    async def turn(self, ep: Episode) -> str:
        box = self.by_uid.get(ep.uid)
        if box is None:
            box = await self.boxes.borrow()  # clean: near miss, kept over the turns and end gives it
            self.by_uid[ep.uid] = box
        ep.turns += 1
        return await self.policy.act(box, ep.tokens)

    def end(self, ep: Episode) -> None:
        box = self.by_uid.pop(ep.uid, None)
        if box is not None:
            self.boxes.give(box)


class VerifierQueue:
    """Checks answers in sandboxes, results are collected by the trainer."""

    def __init__(self, boxes: SandboxPool):
        self.boxes = boxes
        self.tasks: Dict[int, asyncio.Task] = {}

    async def submit(self, uid: int, answer: str) -> None:
        box = await self.boxes.borrow()  # leak: a verdict of None returns from _check before give
        self.tasks[uid] = asyncio.create_task(self._check(box, answer))

    async def _check(self, box, answer: str) -> float:
        verdict = await box.run(answer)
        if verdict is None:
            return 0.0
        self.boxes.give(box)
        return float(verdict)

    async def submit_timed(self, uid: int, answer: str, limit: float) -> None:
        box = await self.boxes.borrow()  # clean: the task's finally gives it
        self.tasks[uid] = asyncio.create_task(self._timed(box, answer, limit))

    async def _timed(self, box, answer: str, limit: float) -> float:
        try:
            return float(await asyncio.wait_for(box.run(answer), limit))
        except asyncio.TimeoutError:
            return 0.0
        finally:
            self.boxes.give(box)


class StaleFilter:
    """Drops episodes sampled with weights that are too old."""

    def __init__(self, slots: SequenceSlots, max_lag: int):
        self.slots = slots
        self.max_lag = max_lag
        self.queue: Deque[tuple] = deque()

    def enqueue(self, ep: Episode, version: int) -> bool:
        slot = self.slots.reserve()  # leak: next skips stale entries with continue, without cancel
        if slot is None:
            return False
        ep.slot = slot
        self.queue.append((version, ep))
        return True

    def next(self, version: int) -> Optional[Episode]:
        while self.queue:
            born, ep = self.queue.popleft()
            if version - born > self.max_lag:
                log.info("episode %d is stale", ep.uid)
                continue
            self.slots.cancel(ep.slot)
            return ep
        return None


class PartialRollout:
    """Paused episodes keep their slot over a weight update."""

    def __init__(self, slots: SequenceSlots):
        self.slots = slots
        self.running: Dict[int, int] = {}
        self.paused: Dict[int, int] = {}

    def run(self, uid: int) -> bool:
        if uid in self.running:
            return True
        slot = self.paused.pop(uid, None)
        if slot is None:
            slot = self.slots.reserve()  # clean: near miss, moves between two tables, shutdown ends both
        if slot is None:
            return False
        self.running[uid] = slot
        return True

    def pause_all(self) -> None:
        self.paused.update(self.running)
        self.running.clear()

    def done(self, uid: int) -> None:
        self.slots.cancel(self.running.pop(uid))

    def shutdown(self) -> None:
        for table in (self.running, self.paused):
            while table:
                self.slots.cancel(table.popitem()[1])


class RetryRunner:
    def __init__(self, slots: SequenceSlots, engine):
        self.slots = slots
        self.engine = engine

    async def generate(self, ep: Episode, tries: int = 3) -> bool:
        for _ in range(tries):
            ep.slot = self.slots.reserve()  # leak: a retry after ConnectionError overwrites the slot in the record
            if ep.slot is None:
                return False
            try:
                ep.tokens = await self.engine.generate(ep.slot, ep.prompt)
                self.slots.cancel(ep.slot)
                return True
            except ConnectionError:
                await asyncio.sleep(0.1)
        return False
