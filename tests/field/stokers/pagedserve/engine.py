from __future__ import annotations

from typing import Callable, Dict, List, Optional

from .blocks import BlockPool
from .scheduler import Scheduler
from .sequence import Sequence

Model = Callable[[List[List[int]]], List[int]]


class Engine:
    def __init__(self, pool: BlockPool, scheduler: Scheduler, model: Model, eos: int) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.model = model
        self.eos = eos
        self.system_prefix: List[int] = []
        self.system_tokens: List[int] = []

    def step(self) -> Dict[str, int]:
        batch = self.scheduler.schedule()
        if not batch:
            return {}
        out: Dict[str, int] = {}
        for seq, token in zip(batch, self.model([s.blocks for s in batch])):
            seq.tokens.append(token)
            out[seq.ident] = token
            if token == self.eos or seq.exhausted:
                self.scheduler.finish(seq)
        return out

    def set_system_prompt(self, tokens: List[int]) -> bool:
        probe = Sequence("system", tokens)
        blocks = self.pool.allocate_aligned(probe.blocks_needed(self.pool.block_size), 8)  # clean: near miss, replaces the former prefix, which is released
        if blocks is None:
            return False
        self.pool.release(self.system_prefix)
        self.system_prefix = blocks
        self.system_tokens = tokens
        for block, h in zip(blocks, probe.block_hashes(self.pool.block_size)):
            self.pool.publish(block, h)
        return True

    def prefix_length(self, tokens: List[int]) -> int:
        probe = Sequence("probe", tokens)
        hit = self.pool.lookup(probe.block_hashes(self.pool.block_size))  # leak: only the length is wanted, the references stay
        return len(hit) * self.pool.block_size

    def score(self, tokens: List[int]) -> Optional[int]:
        probe = Sequence("score", tokens)
        blocks = self.pool.allocate(probe.blocks_needed(self.pool.block_size))  # clean: near miss, released by the finally
        if blocks is None:
            return None
        try:
            return self.model([blocks])[0]
        finally:
            self.pool.release(blocks)

    def fork(self, parent: Sequence, ident: str) -> Optional[Sequence]:
        child = Sequence(ident, list(parent.tokens), max_tokens=parent.max_tokens)
        child.prompt_len = parent.prompt_len
        for block in parent.blocks[:-1]:
            child.blocks.append(self.pool.touch(block))  # leak: without a block for the tail the child is dropped with its references
        tail = self.pool.allocate(1)  # clean: part of the child, released when it finishes
        if tail is None:
            return None
        child.blocks.extend(tail)
        self.scheduler.running.append(child)
        return child

    def fork_pair(self, parent: Sequence, ident: str) -> List[Sequence]:
        made: List[Sequence] = []
        for i in range(2):
            tail = self.pool.allocate(1)  # clean: near miss, allocated before anything is touched and kept in the child
            if tail is None:
                break
            child = Sequence(f"{ident}/{i}", list(parent.tokens), max_tokens=parent.max_tokens)
            child.blocks = [self.pool.touch(b) for b in parent.blocks[:-1]] + tail  # clean: released when the child finishes
            self.scheduler.running.append(child)
            made.append(child)
        return made

    def close(self) -> None:
        self.pool.release(self.system_prefix)
        self.system_prefix = []
