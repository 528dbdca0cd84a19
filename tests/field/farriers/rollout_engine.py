"""Small asyncio rollout engine for GRPO: paged KV, decode slots, group sampling with prefix sharing."""
from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

logger = logging.getLogger("rollout")


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def allocate(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        out = [self._free.popleft() for _ in range(n)]
        for b in out:
            self._refs[b] = 1
        return out

    def share(self, blocks: list[int]) -> list[int]:
        for b in blocks:
            self._refs[b] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        for b in blocks:
            self._refs[b] -= 1
            if self._refs[b] == 0:
                self._free.append(b)


class DecodeSlots:
    def __init__(self, n: int) -> None:
        self._idle = list(range(n))
        self._cv = asyncio.Condition()

    async def take(self) -> int:
        async with self._cv:
            while not self._idle:
                await self._cv.wait()
            return self._idle.pop()

    def try_take(self) -> int | None:
        return self._idle.pop() if self._idle else None

    async def put(self, slot: int) -> None:
        async with self._cv:
            self._idle.append(slot)
            self._cv.notify()


@dataclass
class Sample:
    uid: str
    prompt: list[int]
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    out: list[int] = field(default_factory=list)
    stop_reason: str = ""


class RolloutEngine:
    def __init__(self, runner, bm: BlockManager, slots: DecodeSlots, max_new: int, eos: int) -> None:
        self.runner = runner
        self.bm = bm
        self.slots = slots
        self.max_new = max_new
        self.eos = eos
        self.running: dict[str, Sample] = {}
        self.paused: dict[str, Sample] = {}
        self._prefix: dict[int, list[int]] = {}

    def _n_blocks(self, ntok: int) -> int:
        return -(-ntok // self.bm.block_size)

    def pin_prefix(self, key: int, ntok: int) -> bool:
        blocks = self.bm.allocate(self._n_blocks(ntok))  # leak: a system prompt pinned again under its key overwrites the old blocks
        if blocks is None:
            return False
        self._prefix[key] = blocks
        return True

    def flush_prefix(self) -> None:
        for blocks in self._prefix.values():
            self.bm.release(blocks)
        self._prefix.clear()

    def admit(self, s: Sample, key: int | None = None) -> bool:
        slot = self.slots.try_take()  # leak: the slot is not put back when the prompt does not fit
        if slot is None:
            return False
        head = self.bm.share(self._prefix[key]) if key in self._prefix else []  # clean: near miss, released on the failing branch, else part of s.blocks
        tail = self.bm.allocate(self._n_blocks(len(s.prompt)) + 1)  # clean: moved into the sample and released by _retire
        if tail is None:
            self.bm.release(head)
            return False
        s.blocks = head + tail
        s.slot = slot
        self.running[s.uid] = s
        return True

    def _grow(self, s: Sample) -> bool:
        if len(s.prompt) + len(s.out) < len(s.blocks) * self.bm.block_size:
            return True
        more = self.bm.allocate(1)  # clean: near miss, appended to the blocks of the sample
        if more is None:
            return False
        s.blocks += more
        return True

    async def _retire(self, s: Sample, why: str) -> None:
        self.running.pop(s.uid, None)
        s.stop_reason = why
        self.bm.release(s.blocks)
        s.blocks = []
        if s.slot is not None:
            slot, s.slot = s.slot, None
            await self.slots.put(slot)

    async def pause(self, uid: str) -> bool:
        s = self.running.pop(uid, None)
        if s is None:
            return False
        self.paused[uid] = s
        if s.slot is not None:
            slot, s.slot = s.slot, None
            await self.slots.put(slot)
        return True

    async def resume(self, uid: str) -> bool:
        slot = await self.slots.take()  # clean: near miss, put back when the sample is gone, else _retire puts it
        s = self.paused.pop(uid, None)
        if s is None:
            await self.slots.put(slot)
            return False
        s.slot = slot
        self.running[uid] = s
        return True

    async def abort(self, uid: str) -> None:
        for table in (self.running, self.paused):
            s = table.pop(uid, None)
            if s is not None:
                await self._retire(s, "abort")

    async def step(self) -> list[Sample]:
        done: list[Sample] = []
        batch = list(self.running.values())
        toks = await self.runner.decode([(s.slot, s.blocks) for s in batch])
        for s, t in zip(batch, toks):
            if s.uid not in self.running:
                continue
            s.out.append(t)
            if t == self.eos or len(s.out) >= self.max_new:
                await self._retire(s, "stop")
                done.append(s)
            elif not self._grow(s):
                await self._retire(s, "oom")
                done.append(s)
        return done

    async def score_prompt(self, prompt: list[int]) -> float | None:
        slot = await self.slots.take()  # clean: near miss, put back in the finally even when cancelled
        try:
            blocks = self.bm.allocate(self._n_blocks(len(prompt)))  # leak: the timeout handler returns None without releasing them
            if blocks is None:
                return None
            try:
                lp = await asyncio.wait_for(self.runner.logprob(slot, blocks, prompt), timeout=30)
            except asyncio.TimeoutError:
                logger.warning("scoring timed out (%d tokens)", len(prompt))
                return None
            self.bm.release(blocks)
            return lp
        finally:
            await self.slots.put(slot)

    async def best_of_n(self, prompt: list[int], n: int) -> list[int]:
        base = self.bm.allocate(self._n_blocks(len(prompt)))  # clean: near miss, the group's own reference is released after the gather
        if base is None:
            return []
        slot = await self.slots.take()  # clean: put back right after the prefill
        await self.runner.prefill(slot, base, prompt)
        await self.slots.put(slot)
        outs = await asyncio.gather(*(self._branch(base, prompt) for _ in range(n)))
        self.bm.release(base)
        return max(outs, key=len)

    async def _branch(self, base: list[int], prompt: list[int]) -> list[int]:
        view = self.bm.share(base)  # leak: a branch without room for its own block returns with the shared reference kept
        own = self.bm.allocate(1)  # clean: near miss, released together with the shared view
        if own is None:
            return []
        slot = await self.slots.take()  # clean: near miss, put back in the finally
        try:
            return await self.runner.sample(slot, view + own, prompt)
        finally:
            self.bm.release(view + own)
            await self.slots.put(slot)
