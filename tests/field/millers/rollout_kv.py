"""Rollout engine of the RL trainer: KV blocks per sequence, asyncio tasks per prompt group."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Dict, List, Optional, Sequence

NewToken = Callable[[List[int]], Awaitable[int]]
EOS = 0


@dataclass(eq=False)
class KVBlock:
    index: int
    tokens: List[int] = field(default_factory=list)


class OutOfBlocks(Exception):
    pass


class BlockAllocator:
    BLOCK = 4

    def __init__(self, n: int) -> None:
        self._free = [KVBlock(i) for i in range(n)]

    def allocate(self) -> KVBlock:
        if not self._free:
            raise OutOfBlocks
        return self._free.pop()

    def deallocate(self, block: KVBlock) -> None:
        block.tokens.clear()
        self._free.append(block)

    def allocate_for(self, n_tokens: int) -> Optional[List[KVBlock]]:
        need = -(-n_tokens // self.BLOCK)
        if need > len(self._free):
            return None
        return [self.allocate() for _ in range(need)]  # clean: near miss, the room was checked and the list is the caller's

    def free_blocks(self) -> int:
        return len(self._free)


@dataclass
class Rollout:
    prompt: List[int]
    blocks: List[KVBlock] = field(default_factory=list)
    draft: Optional[KVBlock] = None
    output: List[int] = field(default_factory=list)
    aborted: bool = False


class RolloutEngine:
    def __init__(self, allocator: BlockAllocator, next_token: NewToken, max_running: int = 2) -> None:
        self.alloc = allocator
        self.next_token = next_token
        self._running = asyncio.Semaphore(max_running)
        self._gpu = asyncio.Lock()
        self.preempted: Dict[int, Rollout] = {}

    def admit(self, r: Rollout) -> bool:
        blocks = self.alloc.allocate_for(len(r.prompt))  # clean: moved into the rollout, freed by retire
        if blocks is None:
            return False
        for i, b in enumerate(blocks):
            b.tokens.extend(r.prompt[i * BlockAllocator.BLOCK : (i + 1) * BlockAllocator.BLOCK])
        r.blocks.extend(blocks)
        return True

    def admit_shared(self, group: Sequence[Rollout]) -> bool:
        """Prefill of one prompt whose samples start together."""
        blocks = self.alloc.allocate_for(len(group[0].prompt))  # leak: a group whose samples are all aborted drops the list
        if blocks is None:
            return False
        for r in group:
            if not r.aborted:
                r.blocks.extend(blocks)
                return True
        return False

    def grow(self, r: Rollout) -> None:
        if not r.blocks or len(r.blocks[-1].tokens) == BlockAllocator.BLOCK:
            r.blocks.append(self.alloc.allocate())  # clean: in the rollout's list, freed by retire

    def speculate(self, r: Rollout, guess: List[int]) -> None:
        r.draft = self.alloc.allocate()  # leak: a draft that was neither accepted nor rejected is overwritten
        r.draft.tokens.extend(guess)

    def accept(self, r: Rollout) -> None:
        if r.draft is not None:
            r.blocks.append(r.draft)
            r.draft = None

    def reject(self, r: Rollout) -> None:
        if r.draft is not None:
            self.alloc.deallocate(r.draft)
            r.draft = None

    def retire(self, r: Rollout) -> None:
        self.reject(r)
        while r.blocks:
            self.alloc.deallocate(r.blocks.pop())

    async def generate(self, r: Rollout, limit: int) -> List[int]:
        if not self.admit(r):
            return []
        try:
            for _ in range(limit):
                tok = await self.next_token(r.prompt + r.output)
                if tok == EOS:
                    break
                r.output.append(tok)
                self.grow(r)
                r.blocks[-1].tokens.append(tok)
        except OutOfBlocks:
            r.aborted = True
        finally:
            self.retire(r)
        return r.output

    async def generate_limited(self, r: Rollout, limit: int) -> List[int]:
        await self._running.acquire()  # clean: near miss, the aborted return is inside the try
        try:
            if r.aborted:
                return []
            return await self.generate(r, limit)
        finally:
            self._running.release()

    async def score(self, r: Rollout) -> float:
        await self._gpu.acquire()  # leak: an empty output returns 0.0 with the lock held
        if not r.output:
            return 0.0
        last = await self.next_token(r.output)
        self._gpu.release()
        return last / len(r.output)

    async def group(self, prompt: List[int], n: int, limit: int) -> List[List[int]]:
        tasks = [asyncio.create_task(self.generate_limited(Rollout(list(prompt)), limit)) for _ in range(n)]
        return list(await asyncio.gather(*tasks))

    async def first_of(self, prompts: Sequence[List[int]], probe: NewToken) -> int:
        """Start one task per prompt; each takes over the block it is given."""
        tasks = []
        for p in prompts:
            block = self.alloc.allocate()  # leak: a prompt without tokens continues before the task takes it over
            if not p:
                continue
            block.tokens.extend(p[: BlockAllocator.BLOCK])
            tasks.append(asyncio.create_task(self._probe(block, probe)))
        return max(await asyncio.gather(*tasks), default=0)

    async def _probe(self, block: KVBlock, probe: NewToken) -> int:
        try:
            return await probe(block.tokens)
        finally:
            self.alloc.deallocate(block)

    async def longest(self, prompts: Sequence[List[int]], probe: NewToken) -> int:
        tasks = []
        for p in filter(None, prompts):
            block = self.alloc.allocate()  # clean: near miss, moved into the task, which deallocates it
            block.tokens.extend(p[-BlockAllocator.BLOCK :])
            tasks.append(asyncio.create_task(self._probe(block, probe)))
        return max(await asyncio.gather(*tasks), default=0)

    def preempt(self, rid: int, r: Rollout) -> None:
        old = self.preempted.pop(rid, None)
        if old is not None and old is not r:
            self.retire(old)
        self.preempted[rid] = r

    def resume(self, rid: int) -> Optional[Rollout]:
        return self.preempted.pop(rid, None)

    def abort_preempted(self) -> int:
        n = len(self.preempted)
        for rid in list(self.preempted):
            self.retire(self.preempted.pop(rid))
        return n


class PrefixProbe:
    """Measures how far a prompt matches blocks already on the device."""

    def __init__(self, alloc: BlockAllocator) -> None:
        self.alloc = alloc

    def probe(self, prompts: Sequence[List[int]], resident: Sequence[List[int]]) -> List[int]:
        hits = []
        for p in prompts:
            block = self.alloc.allocate()  # leak: an exact match continues without deallocate
            block.tokens.extend(p[: BlockAllocator.BLOCK])
            if block.tokens in resident:
                hits.append(len(block.tokens))
                continue
            hits.append(0)
            self.alloc.deallocate(block)
        return hits

    def probe_async(self, prompt: List[int], done: Callable[[KVBlock], None]) -> bool:
        """``done`` deallocates the block."""
        try:
            block = self.alloc.allocate()  # clean: near miss, the callback frees it; nothing held when it raises
        except OutOfBlocks:
            return False
        block.tokens.extend(prompt[: BlockAllocator.BLOCK])
        asyncio.get_running_loop().call_soon(done, block)
        return True


async def main() -> None:
    async def model(ctx: List[int]) -> int:
        await asyncio.sleep(0)
        return EOS if len(ctx) > 9 else len(ctx)

    alloc = BlockAllocator(8)
    eng = RolloutEngine(alloc, model)
    print(await eng.group([1, 2, 3], 3, 20))
    PrefixProbe(alloc).probe_async([1, 2], alloc.deallocate)
    r = Rollout([1, 2, 3, 4, 5])
    assert eng.admit(r)
    eng.speculate(r, [7])
    eng.preempt(1, r)
    eng.abort_preempted()
    assert await eng.longest([[1, 2], [], [3]], model) == 2
    await asyncio.sleep(0)
    assert alloc.free_blocks() == 8
    PrefixProbe(alloc).probe([[1]], [[1]])
    print(alloc.free_blocks())


if __name__ == "__main__":
    asyncio.run(main())
