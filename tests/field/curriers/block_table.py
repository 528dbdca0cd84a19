"""Block table with shared prefixes; blocks are counted."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple


@dataclass
class Block:
    index: int
    count: int = 0


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    table: List[Block] = field(default_factory=list)


class NoBlocks(Exception):
    pass


class BlockPool:
    def __init__(self, n: int) -> None:
        self.blocks = [Block(i) for i in range(n)]
        self.free_list: List[Block] = list(self.blocks)

    def new_block(self) -> Block:
        if not self.free_list:
            raise NoBlocks()
        block = self.free_list.pop()
        block.count = 1
        return block

    def share(self, block: Block) -> Block:
        block.count += 1
        return block

    def drop(self, block: Block) -> None:
        block.count -= 1
        if block.count == 0:
            self.free_list.append(block)


class BlockManager:
    def __init__(self, pool: BlockPool, block_size: int, watermark: int = 0) -> None:
        self.pool = pool
        self.block_size = block_size
        self.watermark = watermark
        self.prefix: Dict[Tuple[int, ...], Block] = {}
        self.seqs: Dict[int, Sequence] = {}

    def _chunks(self, tokens: List[int]) -> List[Tuple[int, ...]]:
        b = self.block_size
        return [tuple(tokens[i:i + b]) for i in range(0, len(tokens), b)]

    def allocate(self, seq: Sequence) -> bool:
        try:
            for chunk in self._chunks(seq.tokens):
                hit = self.prefix.get(chunk)
                if hit is not None:
                    seq.table.append(self.pool.share(hit))  # clean: owned by the sequence's table, dropped on NoBlocks
                else:
                    seq.table.append(self.pool.new_block())  # clean: owned by the sequence's table, dropped on NoBlocks
        except NoBlocks:
            self.release_table(seq)
            return False
        self.seqs[seq.seq_id] = seq
        return True

    def allocate_flat(self, seq: Sequence) -> bool:
        blocks: List[Block] = []
        try:
            for _ in self._chunks(seq.tokens):
                blocks.append(self.pool.new_block())  # leak: when one is missing the local list of those before it is dropped
        except NoBlocks:
            return False
        seq.table.extend(blocks)
        self.seqs[seq.seq_id] = seq
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        for block in parent.table:
            child.table.append(self.pool.share(block))  # clean: owned by the child
        self.seqs[child.seq_id] = child

    def fork_many(self, parent: Sequence, n: int, limit: int) -> List[Sequence]:
        out: List[Sequence] = []
        for i in range(n):
            shared = [self.pool.share(b) for b in parent.table]  # leak: past the limit the child is not made and its shares are dropped
            if len(self.seqs) >= limit:
                break
            child = Sequence(parent.seq_id * 100 + i, list(parent.tokens), shared)
            self.seqs[child.seq_id] = child
            out.append(child)
        return out

    def append_slot(self, seq: Sequence) -> Optional[Tuple[int, int]]:
        """Copy-on-write of the last block; the pair (src, dst) to copy."""
        last = seq.table[-1]
        if last.count == 1:
            return None
        fresh = self.pool.new_block()  # clean: takes the place of the last block, which is dropped
        self.pool.drop(last)
        seq.table[-1] = fresh
        return last.index, fresh.index

    def truncate(self, seq: Sequence, n_blocks: int) -> None:
        while len(seq.table) > n_blocks:
            self.pool.drop(seq.table.pop())

    def reset_table(self, seq: Sequence, n: int) -> None:
        """Fresh blocks for a sequence that is recomputed."""
        self.release_table(seq)
        seq.table = [self.pool.new_block() for _ in range(n)]  # clean: near miss, the old table was released before

    def pad_last(self, seq: Sequence) -> int:
        tail = self.pool.new_block()  # leak: under the watermark the tail is neither appended nor dropped
        if len(self.pool.free_list) < self.watermark:
            return -1
        seq.table.append(tail)
        return tail.index

    def cache_prefix(self, seq: Sequence) -> int:
        """Keep the sequence's blocks for later prompts."""
        kept = 0
        for chunk, block in zip(self._chunks(seq.tokens), seq.table):
            if chunk in self.prefix:
                continue
            self.prefix[chunk] = self.pool.share(block)  # clean: dropped in evict_prefix
            kept += 1
        return kept

    def evict_prefix(self) -> None:
        for chunk in list(self.prefix):
            self.pool.drop(self.prefix.pop(chunk))

    def release_table(self, seq: Sequence) -> None:
        for block in seq.table:
            self.pool.drop(block)
        seq.table.clear()

    def free(self, seq_id: int) -> None:
        seq = self.seqs.pop(seq_id, None)
        if seq is not None:
            self.release_table(seq)

    def swap_block(self, seq: Sequence, i: int) -> Optional[int]:
        try:
            fresh = self.pool.new_block()  # clean: put into the table in place of the old one, which is dropped
        except NoBlocks:
            return None
        self.pool.drop(seq.table[i])
        seq.table[i] = fresh
        return seq.table[i].index

    def beam_step(self, beams: List[Sequence], keep: List[int]) -> List[Sequence]:
        survivors = []
        for parent in beams:
            tip = self.pool.share(parent.table[-1])  # leak: a beam that is not kept skips the drop of its tip
            if parent.seq_id not in keep:
                self.free(parent.seq_id)
                continue
            survivors.append(parent)
            self.pool.drop(tip)
        return survivors


if __name__ == "__main__":
    m = BlockManager(BlockPool(8), 2)
    s = Sequence(1, [1, 2, 3, 4])
    assert m.allocate(s)
    m.fork(s, Sequence(2, [1, 2, 3, 4]))
    print(m.append_slot(s), m.cache_prefix(s))
    m.free(1); m.free(2); m.evict_prefix()
    print(len(m.pool.free_list))
