from __future__ import annotations

from typing import Callable, List, Optional

from .allocator import AdapterCache, BlockAllocator
from .prefix import PrefixCache
from .request import Rollout
from .scheduler import Scheduler


class RolloutEngine:
    def __init__(self, num_blocks: int = 64, block_size: int = 4) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.adapters = AdapterCache(2)
        self.prefixes = PrefixCache(self.allocator)
        self.scheduler = Scheduler(self.allocator, self.adapters, self.prefixes)

    def step(self, sample: Callable[[Rollout], int]) -> List[Rollout]:
        self.scheduler.admit()
        done: List[Rollout] = []
        for r in list(self.scheduler.running.values()):
            if r.rid not in self.scheduler.running or not self.scheduler.grow(r):
                continue
            r.tokens.append(sample(r))
            r.generated += 1
            if r.finished:
                self.prefixes.insert(r.tokens, r.blocks)
                self.scheduler.finish(r.rid)
                done.append(r)
        return done

    def score(self, tokens: List[int], logprob: Callable[[List[int]], Optional[float]]) -> Optional[float]:
        """Teacher-forced pass over finished tokens with temporary blocks."""
        blocks = self.allocator.allocate(self.allocator.blocks_for(len(tokens)))  # leak: a missing log-prob returns before free
        if blocks is None:
            return None
        value = logprob(tokens)
        if value is None:
            return None
        self.allocator.free(blocks)
        return value / max(1, len(tokens))

    def score_prefix(self, tokens: List[int]) -> int:
        hit = self.prefixes.match(tokens)  # clean: near miss, freed after counting, an empty list is nothing
        if not hit:
            return 0
        n = len(hit) * self.allocator.block_size
        self.allocator.free(hit)
        return n

    def close(self) -> None:
        for rid in list(self.scheduler.running):
            self.scheduler.finish(rid)
        self.prefixes.evict_all()


def main() -> None:
    eng = RolloutEngine()
    for i in range(4):
        eng.scheduler.add(Rollout(i, [1, 2, 3, 4, 5], 6, adapter="a" if i % 2 else None))
    done: List[Rollout] = []
    while len(done) < 4:
        done += eng.step(lambda r: 7)
    print([r.rid for r in done], eng.score([1, 2, 3], lambda t: -1.0), eng.score_prefix(done[0].tokens))
    eng.close()
    print(eng.allocator.num_free(), eng.adapters.pinned())


if __name__ == "__main__":
    main()
