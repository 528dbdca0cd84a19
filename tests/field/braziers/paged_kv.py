"""Paged KV cache: reference-counted blocks, prefix sharing, swapping and the scheduler on top."""
from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Optional, Sequence

import torch

BLOCK = 16


class BlockAllocator:
    """Blocks carry a count; a block returns to the free list when its count falls to zero."""

    def __init__(self, n_blocks: int) -> None:
        self._free: deque[int] = deque(range(n_blocks))
        self._count = [0] * n_blocks

    def alloc(self) -> Optional[int]:
        if not self._free:
            return None
        b = self._free.popleft()
        self._count[b] = 1
        return b

    def retain(self, b: int) -> int:
        self._count[b] += 1
        return b

    def free(self, b: int) -> None:
        self._count[b] -= 1
        if self._count[b] == 0:
            self._free.append(b)

    def shared(self, b: int) -> bool:
        return self._count[b] > 1

    @property
    def available(self) -> int:
        return len(self._free)


@dataclass
class Sequence_:
    sid: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


def blocks_for(n_tokens: int) -> int:
    return -(-n_tokens // BLOCK)


class PrefixIndex:
    """Full blocks of finished prompts by the hash of everything up to their end."""

    def __init__(self, alloc: BlockAllocator) -> None:
        self._alloc = alloc
        self._by_hash: dict[bytes, int] = {}

    @staticmethod
    def _digest(tokens: Sequence[int]) -> bytes:
        return hashlib.blake2b(repr(list(tokens)).encode(), digest_size=16).digest()

    def publish(self, seq: Sequence_) -> None:
        for i in range(len(seq.tokens) // BLOCK):
            key = self._digest(seq.tokens[: (i + 1) * BLOCK])
            if key not in self._by_hash:
                self._by_hash[key] = self._alloc.retain(seq.blocks[i])  # clean: near miss, purge frees it

    def purge(self) -> None:
        for b in self._by_hash.values():
            self._alloc.free(b)
        self._by_hash.clear()

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The longest cached prefix; every returned block is retained for the caller."""
        found: list[int] = []
        for i in range(len(tokens) // BLOCK):
            b = self._by_hash.get(self._digest(tokens[: (i + 1) * BLOCK]))
            if b is None:
                break
            found.append(self._alloc.retain(b))  # clean: near miss, returned to the caller in the list
        return found


class Scheduler:
    def __init__(self, alloc: BlockAllocator, index: PrefixIndex, pages: torch.Tensor) -> None:
        self._alloc = alloc
        self._index = index
        self._pages = pages
        self.running: dict[int, Sequence_] = {}
        self.waiting: deque[Sequence_] = deque()

    def cached_tokens(self, tokens: Sequence[int]) -> int:
        return len(self._index.match(tokens)) * BLOCK  # leak: matched blocks stay retained

    def admit(self, seq: Sequence_) -> bool:
        seq.blocks = self._index.match(seq.tokens)  # clean: near miss, freed by finish, or below on refusal
        missing = blocks_for(len(seq.tokens)) - len(seq.blocks)
        if missing > self._alloc.available:
            for b in seq.blocks:
                self._alloc.free(b)
            seq.blocks = []
            self.waiting.append(seq)
            return False
        for _ in range(missing):
            seq.blocks.append(self._alloc.alloc())  # clean: near miss, owned by the sequence, freed by finish
        self.running[seq.sid] = seq
        return True

    def append_token(self, sid: int, token: int) -> bool:
        seq = self.running[sid]
        if len(seq.tokens) % BLOCK == 0:
            b = self._alloc.alloc()  # clean: near miss, owned by the sequence, freed by finish
            if b is None:
                return False
            seq.blocks.append(b)
        seq.tokens.append(token)
        return True

    def make_private(self, sid: int, i: int) -> bool:
        """Copy on write of block ``i``."""
        seq = self.running[sid]
        old = seq.blocks[i]
        if not self._alloc.shared(old):
            return True
        new = self._alloc.alloc()  # clean: near miss, takes the place of old, which is freed
        if new is None:
            return False
        self._pages[new].copy_(self._pages[old])
        seq.blocks[i] = new
        self._alloc.free(old)
        return True

    def finish(self, sid: int) -> list[int]:
        seq = self.running.pop(sid)
        self._index.publish(seq)
        for b in seq.blocks:
            self._alloc.free(b)
        seq.blocks = []
        return seq.tokens


def try_reserve(alloc: BlockAllocator, n: int) -> Optional[list[int]]:
    got: list[int] = []
    for _ in range(n):
        b = alloc.alloc()  # leak: running dry half-way returns None without freeing the earlier ones
        if b is None:
            return None
        got.append(b)
    return got


def reserve_all(alloc: BlockAllocator, n: int) -> Optional[list[int]]:
    got: list[int] = []
    while len(got) < n:
        b = alloc.alloc()  # clean: near miss, handed on in the list or freed when it runs dry
        if b is None:
            while got:
                alloc.free(got.pop())
            return None
        got.append(b)
    return got


def probe_fragmentation(alloc: BlockAllocator, n: int) -> float:
    """Share of adjacent pairs among the next n blocks."""
    blocks = reserve_all(alloc, n)  # leak: a single block returns before the loop that frees
    if blocks is None:
        return 0.0
    if len(blocks) < 2:
        return 1.0
    runs = sum(1 for a, b in zip(blocks, blocks[1:]) if b == a + 1)
    for b in blocks:
        alloc.free(b)
    return runs / (len(blocks) - 1)


class BeamGroup:
    """Beams over one prompt share its blocks; each beam retains all it can see."""

    def __init__(self, alloc: BlockAllocator, root: Sequence_) -> None:
        self._alloc = alloc
        self._root = root
        self._beams: dict[int, list[int]] = {}
        self._scores: dict[int, float] = {}

    def fork(self, beam: int, score: float) -> None:
        if beam in self._beams:
            self._scores[beam] = score
            return
        self._beams[beam] = [self._alloc.retain(b) for b in self._root.blocks]  # leak: dropped unfreed
        self._scores[beam] = score

    def prune(self, keep: int) -> None:
        ranked = sorted(self._scores, key=self._scores.__getitem__, reverse=True)
        for beam in ranked[keep:]:
            del self._beams[beam]
            del self._scores[beam]

    def select(self) -> int:
        best = max(self._scores, key=self._scores.__getitem__)
        self._beams.clear()
        self._scores.clear()
        return best


class Swapper:
    """Moves sequences between the device allocator and a host one."""

    def __init__(self, device: BlockAllocator, host: BlockAllocator) -> None:
        self._device = device
        self._host = host
        self._parked: dict[int, list[int]] = {}

    def out(self, seq: Sequence_) -> bool:
        if seq.sid in self._parked:
            return False
        host_blocks = reserve_all(self._host, len(seq.blocks))  # clean: near miss, parked, freed by back()
        if host_blocks is None:
            return False
        for b in seq.blocks:
            self._device.free(b)
        seq.blocks = []
        self._parked[seq.sid] = host_blocks
        return True

    def back(self, seq: Sequence_) -> bool:
        parked = self._parked[seq.sid]
        fresh = reserve_all(self._device, len(parked))  # clean: near miss, moved into the caller's sequence
        if fresh is None:
            return False
        del self._parked[seq.sid]
        for b in parked:
            self._host.free(b)
        seq.blocks = fresh
        return True


def speculative_step(alloc: BlockAllocator, pages: torch.Tensor, draft: Sequence[torch.Tensor]) -> int:
    """Write draft tokens to temporary blocks; count those the verifier accepts."""
    accepted = 0
    for kv in draft:
        b = alloc.alloc()  # leak: a rejected draft breaks out with the block still held
        if b is None:
            break
        pages[b, 0].copy_(kv)
        if float(pages[b, 0].abs().max()) > 1e4:
            break
        accepted += 1
        alloc.free(b)
    return accepted
