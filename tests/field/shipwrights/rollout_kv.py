"""Paged KV cache of the rollout workers in RL fine-tuning.

The trainer samples completions with the policy; prompts of a group share
their prefix blocks by reference counts.
"""
from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Sequence

import torch

BLOCK = 16


class OutOfBlocks(Exception):
    pass


class BlockLedger:
    """Free blocks and reference counts."""

    def __init__(self, n: int):
        self.free: deque[int] = deque(range(n))
        self.count: List[int] = [0] * n

    def claim(self) -> int:
        if not self.free:
            raise OutOfBlocks()
        b = self.free.popleft()  # clean: returned with count one
        self.count[b] = 1
        return b

    def share(self, b: int) -> int:
        self.count[b] += 1
        return b

    def yield_up(self, b: int) -> None:
        self.count[b] -= 1
        if self.count[b] == 0:
            self.free.append(b)

    def claim_run(self, n: int) -> Optional[List[int]]:
        if len(self.free) < n:
            return None
        return [self.claim() for _ in range(n)]  # clean: the length was checked and all are returned

    def claim_near(self, b: int, radius: int) -> Optional[int]:
        """A free block not far from b."""
        for _ in range(len(self.free)):
            c = self.free.popleft()  # clean: near miss, a distant block is appended again
            if abs(c - b) <= radius:
                self.count[c] = 1
                return c
            self.free.append(c)
        return None


@dataclass
class Sample:
    rid: int
    prompt: List[int]
    blocks: List[int] = field(default_factory=list)
    tokens: List[int] = field(default_factory=list)
    done: bool = False

    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


class PrefixIndex:
    def __init__(self, ledger: BlockLedger, limit: int):
        self.ledger = ledger
        self.limit = limit
        self.by_hash: Dict[bytes, int] = {}

    @staticmethod
    def digest(tokens: Sequence[int]) -> bytes:
        return hashlib.blake2b(repr(list(tokens)).encode(), digest_size=16).digest()

    def lookup(self, prompt: Sequence[int]) -> List[int]:
        """Shared references to the full blocks of the prompt that are known."""
        hits = []
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            b = self.by_hash.get(self.digest(prompt[:end]))
            if b is None:
                break
            hits.append(self.ledger.share(b))  # clean: the list goes to the caller
        return hits

    def publish(self, prompt: Sequence[int], blocks: Sequence[int]) -> None:
        for i, end in enumerate(range(BLOCK, len(prompt) + 1, BLOCK)):
            h = self.digest(prompt[:end])
            if h in self.by_hash:
                continue
            self.by_hash[h] = self.ledger.share(blocks[i])  # clean: near miss, the index keeps it until shrink()
        self.shrink(self.limit)

    def shrink(self, limit: int) -> None:
        while len(self.by_hash) > limit:
            h = next(iter(self.by_hash))
            self.ledger.yield_up(self.by_hash.pop(h))


class RolloutEngine:
    def __init__(self, ledger: BlockLedger, index: PrefixIndex, policy, max_len: int = 2048):
        self.ledger = ledger
        self.index = index
        self.policy = policy
        self.max_len = max_len
        self.active: Dict[int, Sample] = {}
        self.waiting: deque[Sample] = deque()
        self.draft_blocks: Dict[int, List[int]] = {}

    # -- admission -----------------------------------------------------------
    def admit(self, s: Sample) -> bool:
        need = (len(s.prompt) + BLOCK - 1) // BLOCK
        hits = self.index.lookup(s.prompt)  # leak: the shared references stay when the rest does not fit
        rest = self.ledger.claim_run(need - len(hits))  # clean: in s.blocks until retire()
        if rest is None:
            return False
        s.blocks = hits + rest
        self.active[s.rid] = s
        self.index.publish(s.prompt, s.blocks)
        return True

    def admit_plain(self, s: Sample) -> bool:
        need = (len(s.prompt) + BLOCK - 1) // BLOCK
        for _ in range(need):
            try:
                b = self.ledger.claim()  # clean: near miss, in s.blocks, which the handler gives up
            except OutOfBlocks:
                self._strip(s)
                return False
            s.blocks.append(b)
        self.active[s.rid] = s
        return True

    def admit_group(self, group: List[Sample]) -> bool:
        """All samples of a group or none."""
        plan: Dict[int, List[int]] = {}
        for s in group:
            run = self.ledger.claim_run((len(s.prompt) + BLOCK - 1) // BLOCK)  # leak: runs of the earlier samples stay in the rejected group
            if run is None:
                return False
            plan[s.rid] = run
        for s in group:
            s.blocks = plan[s.rid]
            self.active[s.rid] = s
        return True

    # -- decoding ------------------------------------------------------------
    def grow(self, s: Sample) -> bool:
        if s.length() % BLOCK:
            return True
        try:
            s.blocks.append(self.ledger.claim())  # clean: in s.blocks until retire() or preempt()
        except OutOfBlocks:
            return False
        return True

    def step(self) -> None:
        for s in list(self.active.values()):
            if not self.grow(s):
                self.preempt(s)
                continue
            tok = int(self.policy(s.prompt + s.tokens, s.blocks))
            s.tokens.append(tok)
            if tok == 0 or s.length() >= self.max_len:
                self.retire(s)

    def preempt(self, s: Sample) -> None:
        del self.active[s.rid]
        self._strip(s)
        s.tokens.clear()
        self.waiting.append(s)

    def retire(self, s: Sample) -> None:
        s.done = True
        self.active.pop(s.rid)
        self._strip(s)

    def _strip(self, s: Sample) -> None:
        while s.blocks:
            self.ledger.yield_up(s.blocks.pop())

    # -- forks -----------------------------------------------------------------

    def compact(self, s: Sample, kv: torch.Tensor) -> None:
        """Moves the blocks of a sample next to each other."""
        for i in range(1, len(s.blocks)):
            new = self.ledger.claim_near(s.blocks[i - 1], 4)  # leak: not given up when the present block is nearer
            if new is None:
                continue
            if abs(new - s.blocks[i - 1]) >= abs(s.blocks[i] - s.blocks[i - 1]):
                continue
            kv[new].copy_(kv[s.blocks[i]])
            self.ledger.yield_up(s.blocks[i])
            s.blocks[i] = new

    # -- speculative drafts ------------------------------------------------------
    def draft(self, s: Sample, n: int) -> Optional[List[int]]:
        run = self.ledger.claim_run(n)  # leak: a second draft of the sample overwrites the first run
        if run is None:
            return None
        self.draft_blocks[s.rid] = run
        return [int(self.policy(s.prompt + s.tokens, run)) for _ in range(n * BLOCK)]

    def accept(self, s: Sample, keep: int) -> None:
        run = self.draft_blocks.pop(s.rid, [])
        s.blocks.extend(run[:keep])
        for b in run[keep:]:
            self.ledger.yield_up(b)

    # -- scoring with the reference policy ------------------------------------------

    def logprobs(self, samples: Iterable[Sample], ref) -> Dict[int, float]:
        out = {}
        for s in samples:
            refs = [self.ledger.share(b) for b in s.blocks]  # leak: a sample without tokens continues before the references are given up
            if not s.tokens:
                out[s.rid] = 0.0
                continue
            out[s.rid] = float(ref(s.prompt + s.tokens, refs))
            for b in refs:
                self.ledger.yield_up(b)
        return out

    def prefix_share(self, prompt: Sequence[int]) -> float:
        """Part of a prompt that the index has."""
        return len(self.index.lookup(prompt)) * BLOCK / max(1, len(prompt))  # leak: lookup's references are counted and dropped

    def drain(self) -> None:
        for s in list(self.active.values()):
            self.retire(s)
        for rid in list(self.draft_blocks):
            for b in self.draft_blocks.pop(rid):
                self.ledger.yield_up(b)
        self.index.shrink(0)


def run_group(engine: RolloutEngine, samples: List[Sample], budget: int) -> List[Sample]:
    pending = deque(samples)
    for _ in range(budget):
        while pending and engine.admit_plain(pending[0]):
            pending.popleft()
        if not engine.active and not pending:
            break
        engine.step()
        while engine.waiting:
            pending.append(engine.waiting.popleft())
    engine.drain()
    return [s for s in samples if s.done]
