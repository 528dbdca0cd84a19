from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Iterator, Optional


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    content_hash: Optional[int] = None


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free: deque[Block] = deque(self.blocks)
        self._cached: dict[int, Block] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Block:
        if not self._free:
            raise RuntimeError("no free KV blocks")
        block = self._free.popleft()
        block.ref_cnt = 1
        if block.content_hash is not None:
            self._cached.pop(block.content_hash, None)
            block.content_hash = None
        return block

    def allocate_many(self, n: int) -> Optional[list[Block]]:
        if n > len(self._free):
            return None
        return [self.allocate() for _ in range(n)]  # clean: the whole list goes to the caller

    def inc_ref(self, block: Block) -> None:
        if block.ref_cnt == 0:
            self._free.remove(block)
        block.ref_cnt += 1

    def dec_ref(self, block: Block) -> None:
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            self._free.append(block)

    def lookup(self, content_hash: int) -> Optional[Block]:
        block = self._cached.get(content_hash)
        if block is not None:
            self.inc_ref(block)  # clean: the reference belongs to the caller, who gets the block
        return block

    def publish(self, block: Block, content_hash: int) -> None:
        if content_hash not in self._cached:
            block.content_hash = content_hash
            self._cached[content_hash] = block


@dataclass(eq=False)
class Sequence:
    seq_id: int
    tokens: list[int]
    score: float = 0.0
    table: list[Block] = field(default_factory=list)
    lookahead: list[Block] = field(default_factory=list)


class BlockManager:
    def __init__(self, pool: BlockPool, block_size: int = 16) -> None:
        self.pool = pool
        self.block_size = block_size

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _hashes(self, tokens: list[int]) -> Iterator[int]:
        parent = 0
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            parent = hash((parent, tuple(tokens[start:start + self.block_size])))
            yield parent

    def admit(self, seq: Sequence) -> bool:
        hits: list[Block] = []
        for h in self._hashes(seq.tokens):
            block = self.pool.lookup(h)  # leak: the prefix references stay counted when the remainder does not fit
            if block is None:
                break
            hits.append(block)
        fresh = self.pool.allocate_many(self._blocks_for(len(seq.tokens)) - len(hits))  # clean: put in seq.table, dropped by release()
        if fresh is None:
            return False
        seq.table = hits + fresh
        return True

    def readmit(self, seq: Sequence) -> bool:
        hits: list[Block] = []
        for h in self._hashes(seq.tokens):
            block = self.pool.lookup(h)  # clean: near miss, the references are dropped again when the remainder does not fit
            if block is None:
                break
            hits.append(block)
        fresh = self.pool.allocate_many(self._blocks_for(len(seq.tokens)) - len(hits))  # clean: put in seq.table, dropped by release()
        if fresh is None:
            for block in reversed(hits):
                self.pool.dec_ref(block)
            return False
        seq.table = hits + fresh
        return True

    def append_slot(self, seq: Sequence) -> bool:
        if self.pool.num_free == 0:
            return False
        if self._blocks_for(len(seq.tokens) + 1) > len(seq.table):
            seq.table.append(self.pool.allocate())  # clean: part of the table from here on
            return True
        if seq.table[-1].ref_cnt > 1:
            seq.table[-1] = self.pool.allocate()  # leak: copy-on-write replaces the shared tail without dropping its reference
        return True

    def lookahead_blocks(self, seq: Sequence, k: int) -> int:
        return max(0, self._blocks_for(len(seq.tokens) + k) - len(seq.table))

    def commit_lookahead(self, seq: Sequence) -> None:
        keep = max(0, self._blocks_for(len(seq.tokens)) - len(seq.table))
        seq.table.extend(seq.lookahead[:keep])
        for block in seq.lookahead[keep:]:
            self.pool.dec_ref(block)
        seq.lookahead = []

    def fork(self, parent: Sequence, child: Sequence) -> None:
        for block in parent.table:
            self.pool.inc_ref(block)  # clean: near miss, the child's table carries this reference
        child.table = list(parent.table)

    def release(self, seq: Sequence) -> None:
        for block in reversed(seq.table):
            self.pool.dec_ref(block)
        seq.table.clear()


class SpecScheduler:
    def __init__(self, manager: BlockManager, eos: int, k: int) -> None:
        self.manager = manager
        self.eos = eos
        self.k = k
        self.waiting: deque[Sequence] = deque()
        self.preempted: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def schedule(self) -> list[Sequence]:
        while self.preempted:
            if not self.manager.readmit(self.preempted[0]):  # clean: running sequences are released by finish or preempt
                break
            self.running.append(self.preempted.popleft())
        while self.waiting and not self.preempted:
            if not self.manager.admit(self.waiting[0]):  # clean: on success the head moves to running, which is released later
                break
            self.running.append(self.waiting.popleft())
        for seq in list(self.running):
            extra = self.manager.lookahead_blocks(seq, self.k)
            blocks = self.manager.pool.allocate_many(extra)  # leak: a sequence that hits EOS is released without its lookahead
            if blocks is None:
                self.running.remove(seq)
                self.manager.release(seq)
                self.preempted.append(seq)
                continue
            seq.lookahead = blocks
        return self.running

    def process(self, seq: Sequence, accepted: list[int]) -> None:
        seq.tokens.extend(accepted)
        if self.eos in accepted:
            self.running.remove(seq)
            self.manager.release(seq)
            return
        self.manager.commit_lookahead(seq)


def expand_beams(manager: BlockManager, beams: list[Sequence], candidates: list[tuple[int, int, float]], width: int) -> list[Sequence]:
    grown: list[Sequence] = []
    for parent_idx, token, score in candidates:
        parent = beams[parent_idx]
        child = Sequence(parent.seq_id, parent.tokens + [token], parent.score + score)
        manager.fork(parent, child)  # leak: children cut off by the beam width are dropped with their references
        grown.append(child)
    for parent in beams:
        manager.release(parent)
    grown.sort(key=lambda s: s.score, reverse=True)
    return grown[:width]
