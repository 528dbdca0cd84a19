"""Paged KV blocks for the generation side of RLHF: groups of samples share their prompt."""
from __future__ import annotations

import enum
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional


class BlockAllocator:
    """Block ids with reference counts."""

    def __init__(self, n_blocks: int) -> None:
        self._free: Deque[int] = deque(range(n_blocks))
        self._refs = [0] * n_blocks

    @property
    def n_free(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        bid = self._free.popleft()
        self._refs[bid] = 1
        return bid

    def alloc_n(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        return [self.alloc() for _ in range(n)]  # clean: handed to the caller

    def share(self, bid: int) -> int:
        self._refs[bid] += 1
        return bid

    def unref(self, bid: int) -> None:
        self._refs[bid] -= 1
        if self._refs[bid] == 0:
            self._free.append(bid)

    def is_shared(self, bid: int) -> bool:
        return self._refs[bid] > 1


class State(enum.Enum):
    WAITING = 0
    RUNNING = 1
    DONE = 2


@dataclass
class Sample:
    uid: int
    prompt: List[int]
    tokens: List[int] = field(default_factory=list)
    blocks: List[int] = field(default_factory=list)
    state: State = State.WAITING
    draft: Optional[int] = None
    reward: float = 0.0

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)


class RolloutScheduler:
    def __init__(self, alloc: BlockAllocator, block_size: int, max_running: int) -> None:
        self.alloc = alloc
        self.block_size = block_size
        self.max_running = max_running
        self.waiting: Deque[Sample] = deque()
        self.running: List[Sample] = []
        self.swapped: Dict[int, List[int]] = {}

    # ---- admission ------------------------------------------------------------------------

    def add(self, sample: Sample) -> None:
        self.waiting.append(sample)

    def _need(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def admit(self) -> int:
        n = 0
        while self.waiting and len(self.running) < self.max_running:
            sample = self.waiting[0]
            blocks = self.alloc.alloc_n(self._need(len(sample)))  # clean: near miss, retire() unrefs
            if blocks is None:
                break
            self.waiting.popleft()
            sample.blocks = blocks
            sample.state = State.RUNNING
            self.running.append(sample)
            n += 1
        return n

    def admit_group(self, samples: List[Sample]) -> bool:
        """Samples of one prompt: full prompt blocks are shared, the tail block is private."""
        prompt = samples[0].prompt
        whole = len(prompt) // self.block_size
        if self.alloc.n_free < whole + len(samples):
            return False
        head = self.alloc.alloc_n(whole)  # leak: each sample shares anew, the group's own reference stays
        for s in samples:
            s.blocks = [self.alloc.share(b) for b in head]  # clean: near miss, retire() unrefs
            s.blocks.append(self.alloc.alloc())  # clean: near miss, retire() unrefs
            s.state = State.RUNNING
            self.running.append(s)
        return True

    def fork(self, src: Sample, uid: int) -> Sample:
        """A detached child; launch() or discard() it."""
        child = Sample(uid, list(src.prompt), list(src.tokens))
        for b in src.blocks:
            child.blocks.append(self.alloc.share(b))  # clean: near miss, goes to the caller inside the child
        return child

    def launch(self, child: Sample) -> None:
        child.state = State.RUNNING
        self.running.append(child)

    def discard(self, child: Sample) -> None:
        child.state = State.DONE
        while child.blocks:
            self.alloc.unref(child.blocks.pop())

    # ---- decoding -------------------------------------------------------------------------

    def grow(self, sample: Sample) -> bool:
        if len(sample) % self.block_size:
            return self._unshare_tail(sample)
        if self.alloc.n_free == 0:
            return False
        sample.blocks.append(self.alloc.alloc())  # clean: near miss, retire() unrefs
        return True

    def _unshare_tail(self, sample: Sample) -> bool:
        tail = sample.blocks[-1]
        if not self.alloc.is_shared(tail):
            return True
        if self.alloc.n_free == 0:
            return False
        fresh = self.alloc.alloc()  # clean: replaces the tail whose reference is dropped
        self.alloc.unref(tail)
        sample.blocks[-1] = fresh
        return True

    def truncate(self, sample: Sample, n_tokens: int) -> None:
        keep = self._need(len(sample.prompt) + n_tokens)
        del sample.tokens[n_tokens:]
        for b in sample.blocks[keep:]:
            self.alloc.unref(b)
        del sample.blocks[keep:]

    def speculate(self, sample: Sample) -> bool:
        if self.alloc.n_free < 2 or sample.draft is not None:
            return False
        sample.draft = self.alloc.alloc()  # leak: verify() clears a rejected draft without unref
        return True

    def verify(self, sample: Sample, accepted: int) -> None:
        if sample.draft is None:
            return
        if accepted > 0:
            sample.blocks.append(sample.draft)
        sample.draft = None

    # ---- the end --------------------------------------------------------------------------

    def retire(self, sample: Sample, reward: float) -> None:
        sample.reward = reward
        sample.state = State.DONE
        self.running.remove(sample)
        while sample.blocks:
            self.alloc.unref(sample.blocks.pop())

    def preempt(self) -> Optional[Sample]:
        if not self.running:
            return None
        victim = min(self.running, key=len)
        self.running.remove(victim)
        for b in self.swapped.pop(victim.uid, []):
            self.alloc.unref(b)
        self.swapped[victim.uid] = victim.blocks
        victim.blocks = []
        victim.state = State.WAITING
        self.waiting.appendleft(victim)
        return victim

    def drop_swapped(self) -> int:
        n = 0
        for uid in list(self.swapped):
            for b in self.swapped.pop(uid):
                self.alloc.unref(b)
                n += 1
        return n


def best_of(sched: RolloutScheduler, root: Sample, n: int, score) -> Sample:
    """Fork n children, score them, and keep the best."""
    base = root.uid * 1000
    children = [sched.fork(root, base + i) for i in range(n)]  # clean: near miss, discarded or launched
    children.sort(key=score, reverse=True)
    for c in children[1:]:
        sched.discard(c)
    sched.launch(children[0])
    return children[0]


def estimate_value(sched: RolloutScheduler, root: Sample, n: int, score, rng: random.Random) -> float:
    total = 0.0
    for i in range(n):
        child = sched.fork(root, root.uid * 1000 + i)  # leak: a short child is skipped without discard
        child.tokens.append(rng.randrange(32000))
        if len(child) < sched.block_size:
            continue
        total += score(child)
        sched.discard(child)
    return total / max(n, 1)


def reserve_headroom(alloc: BlockAllocator, fraction: float, body) -> int:
    """Run body with some blocks taken away, to see how preemption behaves."""
    held = alloc.alloc_n(int(alloc.n_free * fraction))  # clean: unref'd one by one after the body
    if held is None:
        return 0
    body()
    for b in held:
        alloc.unref(b)
    return len(held)


def fragment(alloc: BlockAllocator, n: int) -> int:
    """Punch holes into the free list (a stress test for contiguous reads)."""
    held = alloc.alloc_n(n)  # leak: the even positions are never unref'd
    if held is None:
        return 0
    freed = 0
    for i, b in enumerate(held):
        if i % 2:
            alloc.unref(b)
            freed += 1
    return freed


def score_prefix(alloc: BlockAllocator, blocks: List[int], model) -> List[float]:
    """Hold the prefix for the duration of scoring."""
    mine = [alloc.share(b) for b in blocks]  # leak: an empty score returns before the unref loop
    scores = model.score(mine)
    if not scores:
        return []
    for b in mine:
        alloc.unref(b)
    return scores
