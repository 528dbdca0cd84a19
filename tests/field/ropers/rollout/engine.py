from __future__ import annotations

from typing import Dict, Iterable, List, Optional

from .kv import BlockManager
from .request import Sample
from .scheduler import Scheduler


class RolloutEngine:
    def __init__(self, kv: BlockManager, max_running: int = 4) -> None:
        self.kv = kv
        self.sched = Scheduler(kv, max_running)
        self.prefix: Dict[int, int] = {}

    def add(self, samples: Iterable[Sample]) -> None:
        self.sched.waiting.extend(samples)

    def step(self) -> List[Sample]:
        self.sched.admit()
        done: List[Sample] = []
        for s in list(self.sched.running):
            if not self.sched.extend(s):
                self.sched.preempt()
                break
            s.output.append(len(s.output))
            if len(s.output) >= s.max_new:
                self.sched.finish(s)
                done.append(s)
        return done

    def generate(self, samples: List[Sample], max_steps: int = 100) -> List[Sample]:
        self.add(samples)
        out: List[Sample] = []
        for _ in range(max_steps):
            out.extend(self.step())
            if not self.sched.waiting and not self.sched.running:
                break
        return out

    def score_prompt(self, prompt: List[int]) -> Optional[float]:
        blocks = self.kv.alloc_n(self.kv.blocks_for(len(prompt)))  # clean: freed in finally on both returns
        if blocks is None:
            return None
        try:
            if not prompt:
                return 0.0
            return sum(prompt) / len(prompt)
        finally:
            self.kv.free_all(blocks)

    def best_of(self, prompts: List[List[int]]) -> Optional[int]:
        best, best_blocks = None, None
        for i, prompt in enumerate(prompts):
            blocks = self.kv.alloc_n(self.kv.blocks_for(len(prompt)))  # leak: the beaten best's blocks are overwritten, not freed
            if blocks is None:
                break
            if best is None or sum(prompt) > sum(prompts[best]):
                best, best_blocks = i, blocks
            else:
                self.kv.free_all(blocks)
        if best_blocks is not None:
            self.kv.free_all(best_blocks)
        return best

    def cache_prefix(self, key: int) -> bool:
        if key in self.prefix:
            return True
        blk = self.kv.alloc()  # clean: kept in the prefix table, drop_prefix frees it
        if blk is None:
            return False
        self.prefix[key] = blk
        return True

    def use_prefix(self, key: int, sample: Sample) -> bool:
        blk = self.prefix.get(key)
        if blk is None:
            return False
        self.kv.incref(blk)  # leak: a sample that already has blocks returns with the count up
        if sample.blocks:
            return False
        sample.blocks.append(blk)
        return True

    def drop_prefix(self) -> None:
        while self.prefix:
            _, blk = self.prefix.popitem()
            self.kv.free(blk)

    def sync_weights(self) -> None:
        for s in list(self.sched.running):
            self.kv.free_all(s.blocks)
            s.blocks = []
            self.sched.running.remove(s)
            self.sched.waiting.append(s)
