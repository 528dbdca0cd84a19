"""Paged KV cache with shared prefixes: reference counted blocks, forks, swap to the host."""
from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field


class OutOfBlocks(Exception):
    pass


@dataclass
class Block:
    index: int
    refs: int = 0
    filled: int = 0


@dataclass
class BlockStore:
    total: int
    size: int
    blocks: list = field(init=False)
    free: deque = field(init=False)

    def __post_init__(self):
        self.blocks = [Block(i) for i in range(self.total)]
        self.free = deque(range(self.total))

    def alloc(self) -> Block:
        if not self.free:
            raise OutOfBlocks(self.total)
        block = self.blocks[self.free.popleft()]  # clean: returned with one reference
        block.refs = 1
        block.filled = 0
        return block

    def ref(self, block: Block) -> Block:
        block.refs += 1
        return block

    def unref(self, block: Block) -> None:
        block.refs -= 1
        if block.refs == 0:
            self.free.append(block.index)

    @contextlib.contextmanager
    def scratch(self):
        block = self.alloc()  # clean: unref in the finally
        try:
            yield block
        finally:
            self.unref(block)


@dataclass
class Sequence:
    id: str
    tokens: list
    blocks: list = field(default_factory=list)
    draft: list = field(default_factory=list)
    host: list = field(default_factory=list)

    def chunk_hashes(self, size: int):
        digest = hashlib.sha256()
        for start in range(0, len(self.tokens) - size + 1, size):
            digest.update(repr(self.tokens[start:start + size]).encode())
            yield digest.hexdigest()


@dataclass
class CacheManager:
    device: BlockStore
    host: BlockStore
    copy: object                      # copy(kind, source index, target index)
    running: dict = field(default_factory=dict)
    swapped: dict = field(default_factory=dict)
    cached: OrderedDict = field(default_factory=OrderedDict)
    pinned: list = field(default_factory=list)

    # ---- life of a sequence

    def admit(self, seq: Sequence) -> bool:
        if seq.id in self.running or seq.id in self.swapped:
            return False
        need = -(-len(seq.tokens) // self.device.size)
        shared = []
        for h in seq.chunk_hashes(self.device.size):
            hit = self.cached.get(h)
            if hit is None:
                break
            self.cached.move_to_end(h)
            shared.append(self.device.ref(hit))  # leak: without room the handler gives back the fresh blocks only
        fresh = []
        try:
            for _ in range(need - len(shared)):
                fresh.append(self.device.alloc())  # clean: near miss, given back in the handler or owned by the sequence
        except OutOfBlocks:
            for block in fresh:
                self.device.unref(block)
            return False
        seq.blocks = shared + fresh
        for i, block in enumerate(seq.blocks):
            block.filled = min(self.device.size, len(seq.tokens) - i * self.device.size)
        self.running[seq.id] = seq
        return True

    def append_token(self, seq: Sequence, token: int) -> None:
        seq.tokens.append(token)
        last = seq.blocks[-1]
        if last.filled == self.device.size:
            block = self.device.alloc()  # clean: owned by the sequence
            block.filled = 1
            seq.blocks.append(block)
            return
        if last.refs > 1:
            own = self.device.alloc()  # clean: near miss, takes the place of the shared block, which loses a reference
            self.copy("device", last.index, own.index)
            own.filled = last.filled
            seq.blocks[-1] = own
            self.device.unref(last)
            last = own
        last.filled += 1

    def fork(self, parent: Sequence, child_id: str):
        child = Sequence(child_id, list(parent.tokens))
        child.blocks = [self.device.ref(b) for b in parent.blocks]  # leak: a known id returns None after the references were taken
        if child_id in self.running or child_id in self.swapped:
            return None
        self.running[child_id] = child
        return child

    def beam_step(self, parents, choices):
        """choices: (parent position, child id); parents are retired afterwards."""
        children = []
        for position, child_id in choices:
            child = self.fork(parents[position], child_id)  # clean: near miss, None or a child that is in the running table
            if child is not None:
                children.append(child)
        for parent in parents:
            self.finish(parent)
        return children

    def _drop_blocks(self, seq: Sequence) -> None:
        for block in seq.blocks + seq.draft:
            self.device.unref(block)
        seq.blocks, seq.draft = [], []

    def finish(self, seq: Sequence) -> None:
        self.running.pop(seq.id, None)
        self._drop_blocks(seq)

    def abort(self, seq_id: str) -> bool:
        seq = self.running.pop(seq_id, None) or self.swapped.pop(seq_id, None)
        if seq is None:
            return False
        self._drop_blocks(seq)
        return True

    # ---- prefix cache

    def publish(self, seq: Sequence) -> int:
        count = 0
        for h, block in zip(seq.chunk_hashes(self.device.size), seq.blocks):
            self.cached[h] = self.device.ref(block)  # leak: a hash that is there already loses its entry and its reference
            count += 1
        return count

    def evict(self, wanted: int) -> int:
        done = 0
        while self.cached and done < wanted:
            _, block = self.cached.popitem(last=False)
            self.device.unref(block)
            done += 1
        return done

    def copy_prefix(self, h: str, target: int) -> bool:
        hit = self.cached.get(h)
        if hit is None:
            return False
        block = self.device.ref(hit)  # clean: unref in the finally, eviction may come in between
        try:
            self.copy("export", block.index, target)
        finally:
            self.device.unref(block)
        return True

    def pin_system_prompt(self, tokens) -> None:
        need = -(-len(tokens) // self.device.size)
        if len(self.device.free) < need:
            raise OutOfBlocks(need)
        old = self.pinned
        self.pinned = [self.device.alloc() for _ in range(need)]  # clean: near miss, the blocks before go back right below
        for block in old:
            self.device.unref(block)

    def unpin(self) -> None:
        while self.pinned:
            self.device.unref(self.pinned.pop())

    # ---- speculative decoding

    def reserve_draft(self, seq: Sequence, count: int) -> None:
        extra = []
        for _ in range(count):
            extra.append(self.device.alloc())  # leak: OutOfBlocks in a later round leaves the earlier ones in the local list
        seq.draft = extra

    def accept_draft(self, seq: Sequence, count: int) -> None:
        seq.blocks.extend(seq.draft[:count])
        for block in seq.draft[count:]:
            self.device.unref(block)
        seq.draft = []

    def speculate(self, seq: Sequence, propose, verify) -> int:
        try:
            self.reserve_draft(seq, 2)
        except OutOfBlocks:
            return 0
        accepted = verify(seq, propose(seq))
        self.accept_draft(seq, -(-accepted // self.device.size))
        return accepted

    # ---- swapping

    def swap_out(self, seq: Sequence) -> bool:
        slots = []
        for block in seq.blocks:
            if not self.host.free:
                for slot in slots:
                    self.host.unref(slot)
                return False
            slots.append(self.host.alloc())  # leak: abort() of a swapped sequence gives back its device blocks only
        for block, slot in zip(seq.blocks, slots):
            self.copy("out", block.index, slot.index)
            slot.filled = block.filled
        self._drop_blocks(seq)
        seq.host = slots
        self.swapped[seq.id] = self.running.pop(seq.id)
        return True

    def swap_in(self, seq: Sequence) -> bool:
        if len(self.device.free) < len(seq.host):
            return False
        seq.blocks = [self.device.alloc() for _ in seq.host]  # clean: the room was checked and the sequence owns them
        for slot, block in zip(seq.host, seq.blocks):
            self.copy("in", slot.index, block.index)
            block.filled = slot.filled
            self.host.unref(slot)
        seq.host = []
        self.running[seq.id] = self.swapped.pop(seq.id)
        return True

    def permute(self, left: Block, right: Block) -> None:
        with self.device.scratch() as spare:  # clean: the with statement gives it back
            self.copy("device", left.index, spare.index)
            self.copy("device", right.index, left.index)
            self.copy("device", spare.index, right.index)
