"""Paged KV cache for rollout generation: reference-counted blocks, prefix sharing, swap."""
from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import List, Optional, Tuple


class NoFreeBlocks(Exception):
    pass


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    DONE = 3


@dataclass
class Block:
    bid: int
    refs: int = 0
    digest: Optional[int] = None


class BlockAllocator:
    def __init__(self, num_blocks: int):
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free: List[int] = list(range(num_blocks))
        self._by_digest: "OrderedDict[int, int]" = OrderedDict()

    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Block:
        if not self._free:
            raise NoFreeBlocks()
        block = self._blocks[self._free.pop()]
        block.refs = 1
        block.digest = None
        return block

    def incref(self, block: Block) -> Block:
        block.refs += 1
        return block

    def decref(self, block: Block) -> None:
        block.refs -= 1
        if block.refs == 0:
            if block.digest is not None:
                self._by_digest.pop(block.digest, None)
            self._free.append(block.bid)

    def allocate_many(self, n: int) -> List[Block]:
        blocks: List[Block] = []
        try:
            for _ in range(n):
                blocks.append(self.allocate())  # clean: near miss, returned whole or rolled back by the handler
        except NoFreeBlocks:
            for b in blocks:
                self.decref(b)
            raise
        return blocks

    def allocate_contiguous(self, n: int) -> Optional[List[Block]]:
        """A run of consecutive blocks (for the graph-captured kernel)."""
        run: List[Block] = []
        while self._free and len(run) < n:
            block = self.allocate()  # leak: a gap in the ids discards the run collected so far
            if run and block.bid != run[-1].bid - 1:
                run = [block]
            else:
                run.append(block)
        if len(run) < n:
            for b in run:
                self.decref(b)
            return None
        return run

    def lookup(self, digest: int) -> Optional[Block]:
        """A shared block with its count raised, or None."""
        bid = self._by_digest.get(digest)
        if bid is None:
            return None
        return self.incref(self._blocks[bid])  # clean: handed to the caller

    def publish(self, block: Block, digest: int) -> None:
        block.digest = digest
        self._by_digest.setdefault(digest, block.bid)


@dataclass
class Sequence:
    sid: int
    tokens: List[int]
    table: List[Block] = field(default_factory=list)
    status: Status = Status.WAITING
    lookahead: Optional[Block] = None


class KVManager:
    def __init__(self, alloc: BlockAllocator, block_size: int = 4, enable_prefix: bool = True):
        self.alloc = alloc
        self.block_size = block_size
        self.enable_prefix = enable_prefix

    def _digests(self, tokens: List[int]) -> List[int]:
        full = len(tokens) // self.block_size
        return [hash(tuple(tokens[: (i + 1) * self.block_size])) for i in range(full)]

    # -- admission -------------------------------------------------------
    def admit(self, seq: Sequence) -> bool:
        """Fill the sequence's table: shared prefix first, then fresh blocks."""
        shared: List[Block] = []
        if self.enable_prefix:
            for d in self._digests(seq.tokens):
                hit = self.alloc.lookup(d)  # leak: the failed-admission return forgets the shared prefix
                if hit is None:
                    break
                shared.append(hit)
        need = -(-len(seq.tokens) // self.block_size) - len(shared)
        try:
            fresh = self.alloc.allocate_many(need)  # clean: moved into the sequence's table, release drops it
        except NoFreeBlocks:
            return False
        seq.table = shared + fresh
        seq.status = Status.RUNNING
        return True

    def release(self, seq: Sequence) -> None:
        for block in seq.table:
            self.alloc.decref(block)
        seq.table = []
        if seq.lookahead is not None:
            self.alloc.decref(seq.lookahead)
            seq.lookahead = None
        seq.status = Status.DONE

    def hit_length(self, tokens: List[int]) -> int:
        """How many tokens of a prompt are cached."""
        n = 0
        for d in self._digests(tokens):
            block = self.alloc.lookup(d)  # leak: the probe never drops its reference
            if block is None:
                break
            n += self.block_size
        return n

    def is_cached(self, tokens: List[int]) -> bool:
        digests = self._digests(tokens)
        if not digests:
            return False
        block = self.alloc.lookup(digests[-1])  # clean: near miss, None or dropped at once
        if block is None:
            return False
        self.alloc.decref(block)
        return True

    # -- decode ----------------------------------------------------------
    def append(self, seq: Sequence, token: int) -> bool:
        if len(seq.tokens) % self.block_size == 0:
            try:
                seq.table.append(self.alloc.allocate())  # clean: in the table, release drops it
            except NoFreeBlocks:
                return False
        seq.tokens.append(token)
        return True

    def reserve_lookahead(self, seq: Sequence) -> bool:
        if seq.lookahead is not None:
            return True
        try:
            seq.lookahead = self.alloc.allocate()  # clean: near miss, at most one per sequence, release drops it
        except NoFreeBlocks:
            return False
        return True

    def commit_lookahead(self, seq: Sequence, used: bool) -> None:
        block, seq.lookahead = seq.lookahead, None
        if block is None:
            return
        if used:
            seq.table.append(block)
        else:
            self.alloc.decref(block)

    def copy_on_write(self, seq: Sequence, index: int) -> Tuple[int, int]:
        block = seq.table[index]
        if block.refs == 1:
            return block.bid, block.bid
        fresh = self.alloc.allocate()  # clean: replaces the shared block, whose reference is dropped
        seq.table[index] = fresh
        self.alloc.decref(block)
        return block.bid, fresh.bid

    def truncate(self, seq: Sequence, length: int) -> None:
        """Drop the blocks past `length` tokens (rejected drafts)."""
        keep = -(-length // self.block_size)
        while len(seq.table) > keep:
            self.alloc.decref(seq.table.pop())
        seq.tokens = seq.tokens[:length]

    # -- fork / beam -----------------------------------------------------
    def fork(self, parent: Sequence, sid: int) -> Sequence:
        child = Sequence(sid, list(parent.tokens), status=parent.status)
        for block in parent.table:
            child.table.append(self.alloc.incref(block))  # clean: near miss, the child's table holds the reference
        return child

    def fork_ids(self, parent: Sequence) -> List[int]:
        """Block ids for the child's device table."""
        return [self.alloc.incref(b).bid for b in parent.table]  # leak: only the ids survive, nobody drops the raised counts

    def best_of(self, parent: Sequence, n: int) -> Sequence:
        children = [self.fork(parent, parent.sid * 100 + i) for i in range(n)]  # leak: the losers are dropped with their references
        best = max(children, key=lambda c: sum(c.tokens))
        self.release(parent)
        return best

    def migrate(self, seq: Sequence) -> bool:
        """Move the sequence to fresh blocks, e.g. before compaction."""
        try:
            fresh = self.alloc.allocate_many(len(seq.table))  # leak: a sequence that is not running returns without dropping them
        except NoFreeBlocks:
            return False
        if seq.status is not Status.RUNNING:
            return False
        old, seq.table = seq.table, fresh
        for block in old:
            self.alloc.decref(block)
        return True


if __name__ == "__main__":
    al = BlockAllocator(32)
    kv = KVManager(al)
    a = Sequence(1, list(range(10)))
    assert kv.admit(a)
    for blk, d in zip(a.table, kv._digests(a.tokens)):
        al.publish(blk, d)
    b = Sequence(2, list(range(9)))
    assert kv.admit(b) and kv.is_cached(b.tokens)
    kv.append(b, 5), kv.reserve_lookahead(b), kv.commit_lookahead(b, True), kv.copy_on_write(b, 0), kv.truncate(b, 4)
    c = kv.fork(a, 3)  # clean: released below
    kv.migrate(a)
    for s in (a, b, c):
        kv.release(s)
    print(al.num_free())
