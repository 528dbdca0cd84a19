"""Paged KV blocks with prefix sharing for the rollout half of RL training."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Sequence

log = logging.getLogger("rollout.kv")


class KVBlock:
    __slots__ = ("id", "refs", "digest")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.refs = 0
        self.digest: Optional[int] = None


class NoBlocks(RuntimeError):
    pass


class BlockManager:
    def __init__(self, total: int, block_tokens: int = 16) -> None:
        self.block_tokens = block_tokens
        self._blocks = [KVBlock(i) for i in range(total)]
        self._free = list(self._blocks)

    def allocate(self) -> KVBlock:
        if not self._free:
            raise NoBlocks()
        block = self._free.pop()
        block.refs = 1
        return block

    def incref(self, block: KVBlock) -> KVBlock:
        block.refs += 1
        return block

    def decref(self, block: KVBlock) -> None:
        block.refs -= 1
        if block.refs == 0:
            block.digest = None
            self._free.append(block)

    def can_allocate(self, n: int) -> bool:
        return len(self._free) >= n

    @property
    def num_free(self) -> int:
        return len(self._free)


@dataclass
class Sequence_:
    seq_id: int
    tokens: List[int]
    blocks: List[KVBlock] = field(default_factory=list)
    finished: bool = False


class PrefixCache:
    """Maps a digest of a full block of tokens to the block; holds one count on each."""

    def __init__(self, manager: BlockManager, cap: int) -> None:
        self.manager = manager
        self.cap = cap
        self._map: "OrderedDict[int, KVBlock]" = OrderedDict()
        self._prompts: Dict[str, KVBlock] = {}

    def insert(self, digest: int, block: KVBlock) -> None:
        if digest in self._map:
            return
        self._map[digest] = self.manager.incref(block)  # clean: held by the cache, evict drops it
        block.digest = digest
        while len(self._map) > self.cap:
            self.evict()

    def evict(self) -> None:
        _, block = self._map.popitem(last=False)
        self.manager.decref(block)

    def lookup(self, digest: int) -> Optional[KVBlock]:
        """A counted reference for the caller, or None."""
        block = self._map.get(digest)
        if block is None:
            return None
        self._map.move_to_end(digest)
        return self.manager.incref(block)  # clean: returned to the caller

    def pin_prompt(self, name: str, block: KVBlock) -> None:
        """Keeps the block of a system prompt; a later call moves the name on to a newer one."""
        self._prompts[name] = self.manager.incref(block)  # leak: the block that the name held before keeps its count for ever

    def unpin_prompt(self, name: str) -> None:
        block = self._prompts.pop(name, None)
        if block is not None:
            self.manager.decref(block)

    def contains(self, digest: int) -> bool:
        return self.lookup(digest) is not None  # leak: counted reference only tested

    def clear(self) -> None:
        while self._map:
            self.evict()


class SequenceTable:
    def __init__(self, manager: BlockManager, cache: PrefixCache) -> None:
        self.manager = manager
        self.cache = cache
        self._seqs: Dict[int, Sequence_] = {}

    def _digests(self, tokens: Sequence[int]) -> Iterator[int]:
        size = self.manager.block_tokens
        for start in range(0, len(tokens) - size + 1, size):
            yield hash(tuple(tokens[:start + size]))

    def admit(self, seq_id: int, tokens: List[int]) -> Optional[Sequence_]:
        seq = Sequence_(seq_id, tokens)
        shared = 0
        for digest in self._digests(tokens):
            block = self.cache.lookup(digest)  # clean: near miss, break only for None, else appended, rolled back in release
            if block is None:
                break
            seq.blocks.append(block)
            shared += 1
        size = self.manager.block_tokens
        need = -(-len(tokens) // size) - shared
        if not self.manager.can_allocate(need):
            self._release_blocks(seq)
            return None
        for _ in range(need):
            seq.blocks.append(self.manager.allocate())  # clean: in the sequence's list, finish drops them
        self._seqs[seq_id] = seq
        return seq

    def admit_fresh(self, seq_id: int, tokens: List[int]) -> Optional[Sequence_]:
        seq = Sequence_(seq_id, tokens)
        for _ in range(-(-len(tokens) // self.manager.block_tokens)):
            try:
                block = self.manager.allocate()  # leak: blocks got so far are dropped with seq when one is refused
            except NoBlocks:
                log.info("seq %d does not fit", seq_id)
                return None
            seq.blocks.append(block)
        self._seqs[seq_id] = seq
        return seq

    def _release_blocks(self, seq: Sequence_) -> None:
        for block in reversed(seq.blocks):
            self.manager.decref(block)
        seq.blocks.clear()

    def finish(self, seq_id: int) -> None:
        seq = self._seqs.pop(seq_id, None)
        if seq is None:
            return
        seq.finished = True
        self._release_blocks(seq)

    def fork(self, parent_id: int, child_id: int) -> Sequence_:
        parent = self._seqs[parent_id]
        child = Sequence_(child_id, list(parent.tokens))
        for block in parent.blocks:
            self.manager.incref(block)  # clean: near miss, the count belongs to the child's list on the next line
            child.blocks.append(block)
        self._seqs[child_id] = child
        return child

    def fork_trimmed(self, parent_id: int, child_id: int, keep: int) -> Sequence_:
        parent = self._seqs[parent_id]
        for block in parent.blocks:
            self.manager.incref(block)  # leak: only the first `keep` blocks reach the child, the rest stay counted
        child = Sequence_(child_id, parent.tokens[:keep * self.manager.block_tokens], parent.blocks[:keep])
        self._seqs[child_id] = child
        return child

    def copy_on_write(self, seq: Sequence_, index: int) -> KVBlock:
        block = seq.blocks[index]
        if block.refs == 1:
            return block
        fresh = self.manager.allocate()  # clean: replaces the shared block, whose count is dropped
        self.manager.decref(block)
        seq.blocks[index] = fresh
        return fresh

    def append_slot(self, seq: Sequence_, token: int) -> None:
        seq.tokens.append(token)
        if len(seq.tokens) > len(seq.blocks) * self.manager.block_tokens:
            seq.blocks.append(self.manager.allocate())  # clean: in the sequence's list

    def publish(self, seq: Sequence_) -> int:
        published = 0
        for digest, block in zip(self._digests(seq.tokens), seq.blocks):
            hit = self.cache.lookup(digest)  # leak: a hit is counted up and passed over with continue
            if hit is not None:
                continue
            self.cache.insert(digest, block)
            published += 1
        return published

    def dedupe(self, seq: Sequence_) -> int:
        merged = 0
        for i, digest in enumerate(self._digests(seq.tokens)):
            hit = self.cache.lookup(digest)  # clean: near miss, either dropped again or swapped into the list
            if hit is None:
                continue
            if hit is seq.blocks[i]:
                self.manager.decref(hit)
                continue
            self.manager.decref(seq.blocks[i])
            seq.blocks[i] = hit
            merged += 1
        return merged


class SpeculativeDecoder:
    def __init__(self, table: SequenceTable) -> None:
        self.table = table
        self.manager = table.manager

    def draft(self, seq: Sequence_, tokens: List[int], accept: int) -> int:
        extra: List[KVBlock] = []
        while len(extra) * self.manager.block_tokens < len(tokens):
            extra.append(self.manager.allocate())  # leak: after a partial acceptance the unused tail is dropped with the local list
        if accept == 0:
            for block in extra:
                self.manager.decref(block)
            return 0
        used = -(-accept // self.manager.block_tokens)
        seq.blocks.extend(extra[:used])
        seq.tokens.extend(tokens[:accept])
        return used

    def draft_exact(self, seq: Sequence_, tokens: List[int], accept: int) -> int:
        extra: List[KVBlock] = []
        while len(extra) * self.manager.block_tokens < len(tokens):
            extra.append(self.manager.allocate())  # clean: used blocks go to the sequence, the tail is dropped
        used = -(-accept // self.manager.block_tokens)
        seq.blocks.extend(extra[:used])
        for block in extra[used:]:
            self.manager.decref(block)
        seq.tokens.extend(tokens[:accept])
        return used
