"""Paged KV cache: reference counted blocks, prefix sharing, swap to host."""
from __future__ import annotations

import enum
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Iterator

BLOCK = 16


class OutOfBlocks(RuntimeError):
    pass


State = enum.Enum("State", "WAITING RUNNING SWAPPED DONE")


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def alloc(self) -> int:
        if not self._free:
            raise OutOfBlocks
        block = self._free.popleft()  # clean: returned with one reference
        self._refs[block] = 1
        return block

    def alloc_many(self, n: int) -> list[int]:
        if len(self._free) < n:
            raise OutOfBlocks(f"{n} wanted, {len(self._free)} free")
        return [self.alloc() for _ in range(n)]  # clean: near miss, cannot stop half way because the number was checked

    def share(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1


class HostPool:
    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))

    def take(self) -> int | None:
        return self._free.pop() if self._free else None  # clean: returned

    def give(self, slot: int) -> None:
        self._free.append(slot)


@dataclass(eq=False)
class Sequence:
    id: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    state: State = State.WAITING


def chain_hashes(tokens: list[int]) -> Iterator[int]:
    key = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, *tokens[start : start + BLOCK]))
        yield key


class PrefixCache:
    def __init__(self, allocator: BlockAllocator, capacity: int) -> None:
        self._alloc = allocator
        self._capacity = capacity
        self._table: OrderedDict[int, int] = OrderedDict()

    def match(self, tokens: list[int]) -> list[int]:
        hit: list[int] = []
        for key in chain_hashes(tokens):
            block = self._table.get(key)
            if block is None:
                break
            self._table.move_to_end(key)
            hit.append(self._alloc.share(block))  # clean: the list of references is returned
        return hit

    def insert(self, seq: Sequence) -> None:
        for key, block in zip(chain_hashes(seq.tokens), seq.blocks):
            self._table[key] = self._alloc.share(block)  # leak: a key that is already cached is overwritten with its reference
        while len(self._table) > self._capacity:
            _, block = self._table.popitem(last=False)
            self._alloc.drop(block)

    def clear(self) -> None:
        for block in self._table.values():
            self._alloc.drop(block)
        self._table.clear()


class KVManager:
    def __init__(self, device: BlockAllocator, host: HostPool, cache: PrefixCache) -> None:
        self._device = device
        self._host = host
        self._cache = cache
        self._swapped: dict[int, list[int]] = {}
        self.copies: list[tuple[int, int]] = []

    def admit(self, seq: Sequence) -> bool:
        hit = self._cache.match(seq.tokens)  # leak: without room for the rest the sequence is rejected with the hits still shared
        need = math.ceil(len(seq.tokens) / BLOCK) - len(hit)
        try:
            fresh = self._device.alloc_many(need)  # clean: owned by the sequence, dropped in release()
        except OutOfBlocks:
            return False
        seq.blocks = hit + fresh
        seq.state = State.RUNNING
        return True

    def append_token(self, seq: Sequence, token: int) -> None:
        if len(seq.tokens) % BLOCK == 0:
            seq.blocks.append(self._device.alloc())  # clean: owned by the sequence
        else:
            last = seq.blocks[-1]
            if self._device.is_shared(last):
                copy = self._device.alloc()  # clean: near miss, takes the place of the shared block, whose reference is dropped
                self.copies.append((last, copy))
                seq.blocks[-1] = copy
                self._device.drop(last)
        seq.tokens.append(token)

    def fork(self, parent: Sequence, child_id: int) -> Sequence:
        child = Sequence(child_id, list(parent.tokens), state=State.RUNNING)
        child.blocks = [self._device.share(b) for b in parent.blocks]  # clean: the child that holds them is returned
        return child

    def release(self, seq: Sequence) -> None:
        for block in seq.blocks:
            self._device.drop(block)
        seq.blocks = []

    def finish(self, seq: Sequence) -> None:
        self._cache.insert(seq)
        self.release(seq)
        seq.state = State.DONE

    def swap_out(self, seq: Sequence) -> bool:
        slots: list[int] = []
        for block in seq.blocks:
            slot = self._host.take()  # leak: a full host pool ends the swap and the slots taken so far are forgotten
            if slot is None:
                return False
            self.copies.append((block, -slot - 1))
            slots.append(slot)
        self._swapped[seq.id] = slots
        self.release(seq)
        seq.state = State.SWAPPED
        return True

    def swap_in(self, seq: Sequence) -> bool:
        slots = self._swapped[seq.id]
        try:
            blocks = self._device.alloc_many(len(slots))  # clean: they belong to the sequence from here
        except OutOfBlocks:
            return False
        for slot, block in zip(slots, blocks):
            self.copies.append((-slot - 1, block))
            self._host.give(slot)
        del self._swapped[seq.id]
        seq.blocks = blocks
        seq.state = State.RUNNING
        return True

    def reserve_draft(self, k: int) -> list[int]:
        return self._device.alloc_many(math.ceil(k / BLOCK))  # clean: returned

    def drop_draft(self, blocks: list[int]) -> None:
        for block in blocks:
            self._device.drop(block)


class BeamGroup:
    def __init__(self, kv: KVManager, root: Sequence, width: int) -> None:
        self._kv = kv
        self._width = width
        self._beams = [root]
        self._next_id = root.id * 1000

    def expand(self, tops: list[list[tuple[int, float]]]) -> None:
        candidates: list[tuple[float, int, Sequence]] = []
        for beam, top in zip(self._beams, tops):
            for token, logprob in top:
                self._next_id += 1
                child = self._kv.fork(beam, self._next_id)  # leak: the candidates beyond the width are sliced off unreleased
                candidates.append((logprob, token, child))
        candidates.sort(key=lambda c: c[0], reverse=True)
        for beam in self._beams:
            self._kv.release(beam)
        self._beams = []
        for _, token, child in candidates[: self._width]:
            self._beams.append(child)
            self._kv.append_token(child, token)

    def close(self) -> Sequence:
        best, *rest = self._beams
        for beam in rest:
            self._kv.release(beam)
        self._kv.finish(best)
        return best


class Scheduler:
    def __init__(self, kv: KVManager, proposer, verifier) -> None:
        self._kv = kv
        self._propose = proposer
        self._verify = verifier
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()

    def step(self, sampled: dict[int, int], eos: int) -> None:
        while self.waiting and self._kv.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for seq in list(self.running):
            token = sampled.get(seq.id)
            if token is None or seq not in self.running:
                continue
            if token == eos:
                self.running.remove(seq)
                self._kv.finish(seq)
                continue
            try:
                self._kv.append_token(seq, token)
            except OutOfBlocks:
                self._preempt()

    def _preempt(self) -> None:
        victim = self.running.pop()
        self._kv.release(victim)
        victim.state = State.WAITING
        self.waiting.appendleft(victim)

    def speculate(self, seq: Sequence, k: int) -> list[int]:
        scratch = self._kv.reserve_draft(k)  # leak: nothing accepted returns before drop_draft()
        draft = self._propose(seq.tokens, k, scratch)
        accepted = self._verify(seq.tokens, draft)
        if not accepted:
            return []
        self._kv.drop_draft(scratch)
        return accepted

    def snapshot(self, seq: Sequence, export) -> None:
        frozen = self._kv.fork(seq, -seq.id)  # clean: finally
        try:
            export(frozen.tokens, frozen.blocks)
        finally:
            self._kv.release(frozen)
