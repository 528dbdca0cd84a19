"""Continuous batching with a block table over a pool of KV cache blocks."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Optional

import torch

log = logging.getLogger("kv")
BLOCK_TOKENS = 16


class BlockPool:
    """Block ids with reference counts; prefix blocks may be shared."""

    def __init__(self, count: int, heads: int, dim: int) -> None:
        self.keys = torch.empty(count, BLOCK_TOKENS, heads, dim)
        self.values = torch.empty(count, BLOCK_TOKENS, heads, dim)
        self._free = deque(range(count))
        self._refs = [0] * count

    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        if not self._free:
            raise MemoryError("no KV block left")
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def alloc_many(self, count: int) -> Optional[list[int]]:
        if count > len(self._free):
            return None
        return [self.alloc() for _ in range(count)]  # clean: near miss, handed to the caller as a list

    def share(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def free_many(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.free(block)


@dataclass(eq=False)
class Sequence:
    ident: str
    tokens: list[int]
    limit: int
    blocks: list[int] = field(default_factory=list)
    finished: bool = False
    preempted: int = 0

    def blocks_needed(self) -> int:
        return (len(self.tokens) + BLOCK_TOKENS - 1) // BLOCK_TOKENS


class PrefixCache:
    """Keeps one reference on the blocks of popular prefixes."""

    def __init__(self, pool: BlockPool, capacity: int) -> None:
        self.pool = pool
        self.capacity = capacity
        self._by_hash: dict[int, list[int]] = {}

    def remember(self, key: int, blocks: list[int]) -> None:
        if key in self._by_hash:
            return
        while len(self._by_hash) >= self.capacity:
            self._evict_one()
        self._by_hash[key] = [self.pool.share(b) for b in blocks]  # clean: near miss, freed by _evict_one

    def _evict_one(self) -> None:
        oldest = next(iter(self._by_hash))
        self.pool.free_many(self._by_hash.pop(oldest))

    def match(self, key: int) -> list[int]:
        """Shared blocks for a new sequence, which owns the references."""
        return [self.pool.share(b) for b in self._by_hash.get(key, ())]  # clean: handed to the caller

    def clear(self) -> None:
        while self._by_hash:
            self._evict_one()


class Batcher:
    def __init__(self, pool: BlockPool, prefixes: PrefixCache, width: int) -> None:
        self.pool = pool
        self.prefixes = prefixes
        self.width = width
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def submit(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def admit(self) -> int:
        admitted = 0
        while self.waiting and len(self.running) < self.width:
            seq = self.waiting[0]
            shared = self.prefixes.match(hash(tuple(seq.tokens[:64])))  # leak: kept when the rest does not fit
            rest = self.pool.alloc_many(max(0, seq.blocks_needed() - len(shared)))  # clean: into seq.blocks
            if rest is None:
                break
            seq.blocks = shared + rest
            self.running.append(self.waiting.popleft())
            admitted += 1
        return admitted

    def extend(self, seq: Sequence, token: int) -> bool:
        seq.tokens.append(token)
        if seq.blocks_needed() > len(seq.blocks):
            if self.pool.num_free() == 0:
                return False
            seq.blocks.append(self.pool.alloc())  # clean: near miss, retire() and preempt() free seq.blocks
        return True

    def step(self, model) -> int:
        produced = 0
        for seq in list(self.running):
            token = model.next_token(seq.tokens, seq.blocks)
            if not self.extend(seq, token):  # clean: near miss, the blocks belong to seq, preempt frees them
                self.preempt(seq)
                continue
            produced += 1
            if token == model.eos or len(seq.tokens) >= seq.limit:
                seq.finished = True
                self.retire(seq)
        return produced

    def retire(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.prefixes.remember(hash(tuple(seq.tokens[:64])), seq.blocks[:4])
        self.pool.free_many(seq.blocks)
        seq.blocks = []

    def preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.free_many(seq.blocks)
        seq.blocks = []
        seq.preempted += 1
        self.waiting.appendleft(seq)

    def cancel(self, ident: str) -> bool:
        for seq in self.running:
            if seq.ident == ident:
                self.running.remove(seq)
                self.pool.free_many(seq.blocks)
                return True
        return False


class BeamSearch:
    """Beams share their full blocks and own the last one."""

    def __init__(self, pool: BlockPool, width: int) -> None:
        self.pool = pool
        self.width = width
        self.beams: list[tuple[float, list[int]]] = []

    def start(self, blocks: list[int]) -> None:
        self.beams = [(0.0, blocks)]

    def fork(self, parent: list[int]) -> list[int]:
        table = [self.pool.share(b) for b in parent[:-1]]  # clean: the new table is returned
        table.append(self.pool.alloc())  # clean: the new table is returned
        self.pool.keys[table[-1]].copy_(self.pool.keys[parent[-1]])
        return table

    def expand(self, scores: list[float]) -> None:
        grown: list[tuple[float, list[int]]] = []
        for total, table in self.beams:
            for score in scores:
                grown.append((total + score, self.fork(table)))  # leak: cut off past the width, unfreed
            self.pool.free_many(table)
        grown.sort(key=lambda item: -item[0])
        self.beams = grown[: self.width]

    def finish(self) -> list[float]:
        for _, table in self.beams:
            self.pool.free_many(table)
        totals = [total for total, _ in self.beams]
        self.beams = []
        return totals


def score_prompt(pool: BlockPool, model, tokens: list[int]) -> Optional[float]:
    blocks = pool.alloc_many((len(tokens) + BLOCK_TOKENS - 1) // BLOCK_TOKENS)  # clean: freed after the pass
    if blocks is None:
        return None
    logits = model.forward(tokens, blocks)
    result = float(torch.log_softmax(logits, -1).sum())
    pool.free_many(blocks)
    return result


def score_choices(pool: BlockPool, model, prompt: list[int], choices: list[list[int]]) -> list[float]:
    scores = []
    base = pool.alloc_many(len(prompt) // BLOCK_TOKENS + 1)  # clean: freed at the end
    if base is None:
        return scores
    for choice in choices:
        extra = pool.alloc()  # leak: the block of an empty choice is skipped over
        if not choice:
            scores.append(float("-inf"))
            continue
        scores.append(float(model.forward(prompt + choice, base + [extra]).sum()))
        pool.free(extra)
    pool.free_many(base)
    return scores


def draft_tokens(pool: BlockPool, draft, seq: Sequence, count: int) -> list[int]:
    scratch = [pool.alloc() for _ in range(2)]  # leak: only the first scratch block is freed
    guesses = []
    for _ in range(count):
        guesses.append(draft.next_token(seq.tokens + guesses, seq.blocks + scratch))
        if guesses[-1] == draft.eos:
            break
    pool.free(scratch[0])
    return guesses


def compact(pool: BlockPool, seq: Sequence) -> int:
    """Move the blocks of a sequence to the lowest free ids."""
    moved = 0
    for index, block in enumerate(seq.blocks):
        if pool.num_free() == 0:
            break
        target = pool.alloc()  # clean: near miss, swapped into the table or freed at once
        if target > block:
            pool.free(target)
            continue
        pool.keys[target].copy_(pool.keys[block])
        pool.values[target].copy_(pool.values[block])
        seq.blocks[index] = target
        pool.free(block)
        moved += 1
    return moved


def clone_tail(pool: BlockPool, seq: Sequence) -> bool:
    """Copy on write for the last block before it is written."""
    if pool.num_free() == 0:
        return False
    fresh = pool.alloc()  # clean: near miss, takes the place of the old one, which is freed
    pool.keys[fresh].copy_(pool.keys[seq.blocks[-1]])
    old, seq.blocks[-1] = seq.blocks[-1], fresh
    pool.free(old)
    return True
