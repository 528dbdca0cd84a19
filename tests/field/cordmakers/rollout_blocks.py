"""KV blocks for rollout generation inside an RL training loop.

Samples of one prompt share the blocks of the prompt by reference count; each
sample owns the blocks of its own tail.  Blocks are integers.
"""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Optional

import torch

logger = logging.getLogger(__name__)

NO_BLOCK = -1


class BlockTable:
    """Reference-counted KV blocks."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.refs = [0] * num_blocks
        self.free_ids = list(range(num_blocks - 1, -1, -1))

    def num_free(self) -> int:
        return len(self.free_ids)

    def alloc(self) -> int:
        if not self.free_ids:
            return NO_BLOCK
        block = self.free_ids.pop()  # clean: counted once and returned to the caller
        self.refs[block] = 1
        return block

    def alloc_many(self, n: int) -> Optional[list[int]]:
        if len(self.free_ids) < n:
            return None
        return [self.alloc() for _ in range(n)]  # clean: returned to the caller in the list

    def alloc_above(self, floor: int) -> int:
        """A block with an id of at least floor, for the split cache."""
        block = self.free_ids.pop() if self.free_ids else NO_BLOCK  # leak: an id below floor is not put on the free list again
        if block < floor:
            return NO_BLOCK
        self.refs[block] = 1
        return block

    def share(self, block: int) -> int:
        self.refs[block] += 1
        return block

    def unref(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.free_ids.append(block)

    def unref_all(self, blocks: list[int]) -> None:
        for b in blocks:
            self.unref(b)
        blocks.clear()


@dataclass
class Sample:
    uid: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    draft: Optional[list[int]] = None
    finished: bool = False

    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


@dataclass
class PromptGroup:
    prompt: list[int]
    shared: list[int]
    samples: list[Sample] = field(default_factory=list)


class RolloutEngine:
    def __init__(self, table: BlockTable, model, eos: int, watermark: int = 4):
        self.table = table
        self.model = model
        self.eos = eos
        self.watermark = watermark
        self.running: dict[int, Sample] = {}
        self.groups: list[PromptGroup] = []
        self.parked: dict[int, list[int]] = {}
        self.next_uid = 0

    def admit(self, prompt: list[int], n: int) -> Optional[PromptGroup]:
        need = -(-len(prompt) // self.table.block_size)
        if self.table.num_free() - need < self.watermark:
            return None
        shared = self.table.alloc_many(need)  # clean: moved into the group in self.groups, retire() unrefs it
        if shared is None:
            return None
        group = PromptGroup(prompt, shared)
        for _ in range(n):
            sample = Sample(self.next_uid, prompt)
            self.next_uid += 1
            for b in shared:
                sample.blocks.append(self.table.share(b))  # clean: moved into sample.blocks, stop() unrefs all
            group.samples.append(sample)
            self.running[sample.uid] = sample
        self.groups.append(group)
        return group

    def append_token(self, sample: Sample, token: int) -> bool:
        if sample.length() % self.table.block_size == 0:
            block = self.table.alloc()  # clean: appended to sample.blocks unless it is NO_BLOCK
            if block == NO_BLOCK:
                return False
            sample.blocks.append(block)
        sample.tokens.append(token)
        return True

    def fork(self, sample: Sample) -> Optional[Sample]:
        """Branch a sample; its last block is copied, the others are shared."""
        tail = self.table.alloc()  # leak: kept when the sample has finished
        if tail == NO_BLOCK:
            return None
        if sample.finished:
            return None
        child = Sample(self.next_uid, sample.prompt, list(sample.tokens))
        self.next_uid += 1
        child.blocks = [self.table.share(b) for b in sample.blocks[:-1]]  # clean: moved into the child in self.running, stop() unrefs all
        self.model.copy_block(sample.blocks[-1], tail)
        child.blocks.append(tail)
        self.running[child.uid] = child
        return child

    def write_barrier(self, sample: Sample, i: int) -> bool:
        """Copy on write for block i of the sample."""
        old = sample.blocks[i]
        if self.table.refs[old] == 1:
            return True
        new = self.table.alloc()  # clean: takes the place of the old block, whose reference is dropped
        if new == NO_BLOCK:
            return False
        self.model.copy_block(old, new)
        sample.blocks[i] = new
        self.table.unref(old)
        return True

    def propose(self, sample: Sample, k: int) -> Optional[list[int]]:
        """Draft blocks for speculative tokens."""
        draft = self.table.alloc_many(k)  # leak: a second proposal overwrites the draft that was not resolved
        if draft is None:
            return None
        sample.draft = draft
        return self.model.propose(sample.tokens, draft)

    def resolve(self, sample: Sample, accepted: int) -> None:
        if sample.draft is None:
            return
        keep, drop = sample.draft[:accepted], sample.draft[accepted:]
        sample.blocks.extend(keep)
        self.table.unref_all(drop)
        sample.draft = None

    def park(self, uid: int) -> None:
        sample = self.running[uid]
        self.parked.setdefault(uid, []).extend(sample.blocks)
        sample.blocks = []

    def unpark(self, uid: int) -> None:
        sample = self.running[uid]
        sample.blocks = self.parked.pop(uid) + sample.blocks

    def stop(self, uid: int) -> Sample:
        sample = self.running.pop(uid)
        sample.finished = True
        self.table.unref_all(sample.blocks)
        if uid in self.parked:
            self.table.unref_all(self.parked.pop(uid))
        if sample.draft is not None:
            self.table.unref_all(sample.draft)
            sample.draft = None
        return sample

    def retire(self, group: PromptGroup) -> list[Sample]:
        self.groups.remove(group)
        for sample in group.samples:
            if sample.uid in self.running:
                self.stop(sample.uid)
        self.table.unref_all(group.shared)
        return group.samples

    def score_batch(self, samples: list[Sample]) -> list[torch.Tensor]:
        out = []
        for sample in samples:
            scratch = self.table.alloc_many(-(-sample.length() // self.table.block_size))  # leak: a non-finite score continues without unref_all()
            if scratch is None:
                break
            lp = self.model.logprobs(sample.prompt + sample.tokens, scratch)
            if not torch.isfinite(lp).all():
                logger.warning("sample %d: non-finite reference score", sample.uid)
                continue
            out.append(lp.clone())
            self.table.unref_all(scratch)
        return out

    def pin_pair(self, a: int, b: int) -> Optional[tuple[int, int]]:
        """Hold two blocks while they are compared; b must be full."""
        left = self.table.share(a)  # clean: near miss, unref when b is not in use, else returned in the pair
        if self.table.refs[b] == 0:
            self.table.unref(left)
            return None
        right = self.table.share(b)  # clean: returned to the caller in the pair
        return left, right

    def distance(self, a: int, b: int) -> float:
        pair = self.pin_pair(a, b)  # leak: only the first of the pair is unref'd
        if pair is None:
            return 0.0
        d = float(self.model.block_distance(*pair))
        self.table.unref(pair[0])
        return d

    def prefill_hint(self, group: PromptGroup, uid: int) -> int:
        first = self.table.share(group.shared[0])  # leak: not unref'd when the sample is gone
        sample = self.running.get(uid)
        if sample is None:
            return 0
        hint = self.model.prefix_len(first, sample.tokens)
        self.table.unref(first)
        return hint
