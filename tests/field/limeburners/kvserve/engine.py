"""One step of the engine, and the helpers around it."""
from __future__ import annotations

from typing import Dict, List, Optional

from .blocks import BLOCK_TOKENS, Block, BlockAllocator, PrefixCache, digest_of
from .scheduler import Scheduler, Sequence


class Engine:
    def __init__(self, num_blocks: int, cache_blocks: int, model):
        self.allocator = BlockAllocator(num_blocks)
        self.cache = PrefixCache(self.allocator, cache_blocks)
        self.scheduler = Scheduler(self.allocator, self.cache)
        self.model = model
        self._migrating: Dict[int, List[Block]] = {}

    def step(self) -> Dict[int, int]:
        self.scheduler.admit()
        produced: Dict[int, int] = {}
        for seq in list(self.scheduler.running.values()):
            if not self.scheduler.grow(seq):
                self.scheduler.preempt(seq.seq_id)
                continue
            token = self.model.decode(seq.tokens, [b.index for b in seq.blocks])
            seq.tokens.append(token)
            seq.produced += 1
            produced[seq.seq_id] = token
            if token == self.model.eos or seq.produced >= seq.max_new:
                self._retain_prefix(seq)
                self.scheduler.finish(seq.seq_id)
        return produced

    def _retain_prefix(self, seq: Sequence) -> None:
        parent = ""
        for i, block in enumerate(seq.blocks[: len(seq.tokens) // BLOCK_TOKENS]):
            parent = digest_of(seq.tokens[i * BLOCK_TOKENS:(i + 1) * BLOCK_TOKENS], parent)
            self.cache.insert(parent, block)

    def embed(self, tokens: List[int]) -> Optional[List[float]]:
        blocks = self.allocator.allocate_many(-(-len(tokens) // BLOCK_TOKENS))  # leak: drops just one
        if blocks is None:
            return None
        vector = self.model.embed(tokens, [b.index for b in blocks])
        self.allocator.decref(blocks[0])
        return vector

    def export(self, seq_id: int) -> List[int]:
        """Prefill side of a disaggregated pair: keeps the blocks alive while they are read remotely."""
        seq = self.scheduler.running[seq_id]
        held = []
        for block in seq.blocks:
            held.append(self.allocator.incref(block))  # clean: near miss, export_done drops them
        self._migrating[seq_id] = held
        self.scheduler.finish(seq_id)
        return [b.index for b in held]

    def export_done(self, seq_id: int) -> None:
        for block in self._migrating.pop(seq_id, []):
            self.allocator.decref(block)

    def import_blocks(self, seq: Sequence, fetch) -> bool:
        """Decode side: fills fresh blocks from the peer."""
        need = -(-len(seq.tokens) // BLOCK_TOKENS)
        blocks = self.allocator.allocate_many(need)  # leak: a failed fetch returns without dropping them
        if blocks is None:
            return False
        if not fetch(seq.seq_id, [b.index for b in blocks]):
            return False
        seq.blocks = blocks
        self.scheduler.running[seq.seq_id] = seq
        return True

    def first_block(self, tokens: List[int]) -> Optional[int]:
        """Index of the cached head block, for the debug endpoint."""
        block = self.cache.lookup(digest_of(tokens[:BLOCK_TOKENS]))  # leak: the reference is not dropped
        return None if block is None else block.index
