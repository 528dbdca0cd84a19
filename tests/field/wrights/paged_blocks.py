"""Paged KV block manager: prefix sharing, copy on write, host swap."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


class NoFreeBlocks(Exception):
    pass


@dataclass
class Block:
    block_id: int
    ref_count: int = 0
    content_hash: int | None = None


@dataclass
class Sequence:
    seq_id: int
    token_ids: list[int] = field(default_factory=list)

    def block_hash(self, index: int, block_size: int) -> int:
        return hash(tuple(self.token_ids[: (index + 1) * block_size]))


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: deque[Block] = deque(Block(i) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Block:
        if not self._free:
            raise NoFreeBlocks
        block = self._free.popleft()
        block.ref_count = 1
        return block

    def incref(self, block: Block) -> Block:
        block.ref_count += 1
        return block

    def free(self, block: Block) -> None:
        block.ref_count -= 1
        if block.ref_count == 0:
            block.content_hash = None
            self._free.append(block)

    def allocate_many(self, n: int) -> list[Block]:
        taken: list[Block] = []
        for _ in range(n):
            if not self._free:
                for block in taken:
                    self.free(block)
                raise NoFreeBlocks
            taken.append(self.allocate())  # clean: near miss, the exhausted branch above rolls the list back
        return taken


class BlockSpaceManager:
    def __init__(self, gpu: BlockPool, cpu: BlockPool) -> None:
        self.gpu = gpu
        self.cpu = cpu
        self.tables: dict[int, list[Block]] = {}
        self.swapped: dict[int, list[Block]] = {}
        self.lookahead: dict[int, list[Block]] = {}
        self.candidates: dict[int, list[Block]] = {}
        self.pinned: dict[str, list[Block]] = {}
        self.cached: dict[int, Block] = {}

    def _hit(self, content_hash: int) -> Block | None:
        block = self.cached.get(content_hash)
        if block is None or block.content_hash != content_hash:
            return None
        return block

    def allocate(self, seq: Sequence) -> bool:
        if seq.seq_id in self.tables:
            return True
        size = self.gpu.block_size
        need = (len(seq.token_ids) + size - 1) // size
        table: list[Block] = []
        for i in range(need):
            h = seq.block_hash(i, size)
            hit = self._hit(h)
            if hit is not None:
                table.append(self.gpu.incref(hit))  # clean: near miss, the table is freed when a later block fails
                continue
            try:
                block = self.gpu.allocate()  # clean: goes into the table, which is stored or rolled back
            except NoFreeBlocks:
                for b in table:
                    self.gpu.free(b)
                return False
            block.content_hash = h
            self.cached[h] = block
            table.append(block)
        self.tables[seq.seq_id] = table
        return True

    def append_slot(self, seq: Sequence) -> tuple[int, int] | None:
        table = self.tables[seq.seq_id]
        if len(seq.token_ids) > len(table) * self.gpu.block_size:
            table.append(self.gpu.allocate())  # clean: owned by the sequence's table
            return None
        last = table[-1]
        if last.ref_count == 1:
            last.content_hash = None
            return None
        fresh = self.gpu.allocate()  # clean: replaces the shared block in the table, whose reference is dropped
        table[-1] = fresh
        self.gpu.free(last)
        return last.block_id, fresh.block_id

    def fork(self, parent: Sequence, child: Sequence) -> None:
        assert child.seq_id not in self.tables
        src = self.tables[parent.seq_id]
        self.tables[child.seq_id] = [self.gpu.incref(b) for b in src]  # clean: the child's table is freed by free()

    def free(self, seq: Sequence) -> None:
        for block in self.tables.pop(seq.seq_id, ()):
            self.gpu.free(block)

    # beam search keeps the best hypotheses of the last step alive

    def keep_candidates(self, beams: list[tuple[int, Sequence]]) -> None:
        self.drop_candidates()
        for group, seq in beams:
            src = self.tables[seq.seq_id]
            self.candidates[group] = [self.gpu.incref(b) for b in src]  # leak: a second beam of the same group overwrites the first one's references

    def drop_candidates(self) -> None:
        for blocks in self.candidates.values():
            for block in blocks:
                self.gpu.free(block)
        self.candidates.clear()

    # speculative slots

    def reserve_lookahead(self, seq: Sequence, k: int) -> bool:
        if seq.seq_id in self.lookahead:
            return True
        try:
            self.lookahead[seq.seq_id] = self.gpu.allocate_many(k)  # leak: commit_lookahead keeps the accepted ones and drops the rest
        except NoFreeBlocks:
            return False
        return True

    def commit_lookahead(self, seq: Sequence, accepted: int) -> None:
        blocks = self.lookahead.pop(seq.seq_id, [])
        self.tables[seq.seq_id].extend(blocks[:accepted])

    def swap_out(self, seq: Sequence) -> list[tuple[int, int]] | None:
        gpu_blocks = self.tables[seq.seq_id]
        try:
            cpu_blocks = self.cpu.allocate_many(len(gpu_blocks))  # leak: swap_in pops them and returns early when the GPU is full
        except NoFreeBlocks:
            return None
        self.swapped[seq.seq_id] = cpu_blocks
        mapping = [(g.block_id, c.block_id) for g, c in zip(gpu_blocks, cpu_blocks)]
        self.free(seq)
        return mapping

    def swap_in(self, seq: Sequence) -> list[tuple[int, int]] | None:
        cpu_blocks = self.swapped.pop(seq.seq_id)
        try:
            gpu_blocks = self.gpu.allocate_many(len(cpu_blocks))  # clean: becomes the sequence's table
        except NoFreeBlocks:
            logger.debug("no room to swap in %d", seq.seq_id)
            return None
        self.tables[seq.seq_id] = gpu_blocks
        mapping = []
        for c, g in zip(cpu_blocks, gpu_blocks):
            mapping.append((c.block_id, g.block_id))
            self.cpu.free(c)
        return mapping

    # system prompts

    def pin_prefix(self, name: str, seq: Sequence) -> int:
        held: list[Block] = []
        for i in range(len(seq.token_ids) // self.gpu.block_size):
            hit = self._hit(seq.block_hash(i, self.gpu.block_size))
            if hit is None:
                return 0
            held.append(self.gpu.incref(hit))  # leak: a later miss returns 0 with the earlier references held
        self.unpin_prefix(name)
        self.pinned[name] = held
        return len(held)

    def unpin_prefix(self, name: str) -> None:
        for block in self.pinned.pop(name, ()):
            self.gpu.free(block)

    def match_prefix(self, seq: Sequence) -> list[Block]:
        """Longest cached prefix; each returned block carries a reference for the caller."""
        matched: list[Block] = []
        for i in range(len(seq.token_ids) // self.gpu.block_size):
            hit = self._hit(seq.block_hash(i, self.gpu.block_size))
            if hit is None:
                break
            matched.append(self.gpu.incref(hit))  # clean: returned to the caller with the reference
        return matched


class PrefillPlanner:
    def __init__(self, manager: BlockSpaceManager, budget: int) -> None:
        self.manager = manager
        self.budget = budget

    def new_tokens(self, seq: Sequence) -> int:
        cached = len(self.manager.match_prefix(seq)) * self.manager.gpu.block_size  # leak: only the length is used, the references are dropped
        return len(seq.token_ids) - cached

    def hit_rate(self, seqs: list[Sequence]) -> float:
        total = hits = 0
        for seq in seqs:
            blocks = self.manager.match_prefix(seq)  # clean: near miss, freed right after counting
            total += len(seq.token_ids) // self.manager.gpu.block_size
            hits += len(blocks)
            while blocks:
                self.manager.gpu.free(blocks.pop())
        return hits / total if total else 0.0

    def plan(self, waiting: list[Sequence]) -> list[Sequence]:
        chosen: list[Sequence] = []
        left = self.budget
        for seq in waiting:
            cost = self.new_tokens(seq)
            if cost > left:
                break
            if not self.manager.allocate(seq):  # clean: the sequence is chosen, its table is freed on completion
                break
            left -= cost
            chosen.append(seq)
        return chosen

    def retire(self, finished: list[Sequence]) -> None:
        for seq in finished:
            self.manager.free(seq)
