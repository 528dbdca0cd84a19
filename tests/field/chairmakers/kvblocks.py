"""Block manager for a paged KV cache: prefix sharing, copy-on-write, swapping to the host."""
from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from typing import Deque, Dict, Iterator, List, Optional, Sequence as Seq, Tuple


class NoFreeBlocks(RuntimeError): ...


class Block:
    __slots__ = ("index", "refs", "digest", "filled")

    def __init__(self, index: int) -> None:
        self.index, self.refs, self.filled = index, 0, 0
        self.digest: Optional[bytes] = None


class BlockPool:
    """Blocks with references. A published block whose last reference is dropped
    stays in the LRU, where it can be hit again or be evicted."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: Deque[Block] = deque(Block(i) for i in range(num_blocks))
        self._published: Dict[bytes, Block] = {}
        self._lru: "OrderedDict[bytes, Block]" = OrderedDict()

    @property
    def available(self) -> int:
        return len(self._free) + len(self._lru)

    def take(self) -> Block:
        if self._free:
            block = self._free.popleft()  # clean: handed to the caller with one reference
        elif self._lru:
            digest, block = self._lru.popitem(last=False)  # clean: the evicted block is what the caller gets
            self._published.pop(digest, None)
            block.digest = None
        else:
            raise NoFreeBlocks("no block left")
        block.refs = 1
        block.filled = 0
        return block

    def take_many(self, count: int) -> List[Block]:
        out: List[Block] = []
        for _ in range(count):
            out.append(self.take())  # leak: NoFreeBlocks in a later round throws away the blocks already in out
        return out

    def lookup(self, digest: bytes) -> Optional[Block]:
        block = self._published.get(digest)
        if block is None:
            return None
        if block.refs == 0:
            self._lru.pop(digest)  # clean: near miss, the same block is returned below through the published table
        block.refs += 1
        return block

    def share(self, block: Block) -> Block:
        block.refs += 1
        return block

    def publish(self, block: Block, digest: bytes) -> None:
        if block.digest is not None or digest in self._published:
            return
        block.digest = digest
        self._published[digest] = block

    def drop(self, block: Block) -> None:
        block.refs -= 1
        if block.refs > 0:
            return
        if block.digest is not None:
            self._lru[block.digest] = block
        else:
            self._free.append(block)


class BlockTable:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: List[Block] = []

    def __len__(self) -> int:
        return len(self.blocks)

    def release(self) -> None:
        while self.blocks:
            self.pool.drop(self.blocks.pop())


class SeqState:
    def __init__(self, seq_id: int, prompt: Seq[int]) -> None:
        self.seq_id, self.tokens = seq_id, list(prompt)
        self.finished = False


def chained_digests(tokens: Seq[int], block_size: int) -> Iterator[bytes]:
    prev = b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        h = hashlib.blake2b(prev, digest_size=16)
        h.update(repr(tuple(tokens[start:start + block_size])).encode())
        prev = h.digest()
        yield prev


class BlockManager:
    def __init__(self, pool: BlockPool, host_pool: BlockPool) -> None:
        self.pool, self.host_pool = pool, host_pool
        self.tables: Dict[int, BlockTable] = {}
        self.swapped: Dict[int, BlockTable] = {}
        self._pinned: List[Block] = []

    def allocate(self, seq: SeqState) -> None:
        size = self.pool.block_size
        table = BlockTable(self.pool)
        for digest in chained_digests(seq.tokens, size):
            hit = self.pool.lookup(digest)  # leak: take_many() below raises when memory is short and the table with the hits is gone
            if hit is None:
                break
            table.blocks.append(hit)
        missing = -(-len(seq.tokens) // size) - len(table)
        table.blocks.extend(self.pool.take_many(missing))  # clean: the table is registered and free() releases it
        self.tables[seq.seq_id] = table

    def mark_computed(self, seq: SeqState) -> None:
        table = self.tables[seq.seq_id]
        for block, digest in zip(table.blocks, chained_digests(seq.tokens, self.pool.block_size)):
            block.filled = self.pool.block_size
            self.pool.publish(block, digest)

    def append_slot(self, seq: SeqState) -> Optional[Tuple[int, int]]:
        """Make room for one more token; returns a (src, dst) copy when the block was shared."""
        table = self.tables[seq.seq_id]
        last = table.blocks[-1]
        if last.filled >= self.pool.block_size:
            table.blocks.append(self.pool.take())  # clean: the registered table owns it
            return None
        if last.refs == 1:
            last.filled += 1
            return None
        fresh = self.pool.take()  # clean: near miss, it takes the place of a block whose reference is dropped two lines on
        table.blocks[-1] = fresh
        self.pool.drop(last)
        return last.index, fresh.index

    def fork(self, parent: SeqState, child: SeqState) -> None:
        src = self.tables[parent.seq_id]
        table = BlockTable(self.pool)
        for block in src.blocks:
            table.blocks.append(self.pool.share(block))  # clean: near miss, the child's older table is freed before the new one takes its key
        self.free(child)
        self.tables[child.seq_id] = table

    def swap_out(self, seq: SeqState) -> Optional[List[Tuple[int, int]]]:
        table = self.tables[seq.seq_id]
        if self.host_pool.available < len(table):
            return None
        host = BlockTable(self.host_pool)
        for _ in table.blocks:
            host.blocks.append(self.host_pool.take())  # leak: a swapped sequence that is retired goes through free(), which looks only into tables
        mapping = [(d.index, h.index) for d, h in zip(table.blocks, host.blocks)]
        self.swapped[seq.seq_id] = host
        del self.tables[seq.seq_id]
        table.release()
        return mapping

    def swap_in(self, seq: SeqState) -> Optional[List[Tuple[int, int]]]:
        host = self.swapped[seq.seq_id]
        if self.pool.available < len(host):
            return None
        table = BlockTable(self.pool)
        table.blocks.extend(self.pool.take_many(len(host)))  # clean: near miss, enough blocks were counted first and the table is registered
        mapping = [(h.index, d.index) for h, d in zip(host.blocks, table.blocks)]
        self.tables[seq.seq_id] = table
        del self.swapped[seq.seq_id]
        host.release()
        return mapping

    def free(self, seq: SeqState) -> None:
        table = self.tables.pop(seq.seq_id, None)
        if table is not None:
            table.release()

    def pin_prefix(self, tokens: Seq[int]) -> None:
        self._pinned = []
        for digest in chained_digests(tokens, self.pool.block_size):
            block = self.pool.lookup(digest)  # leak: every reload of the system prompt pins anew and the list before it is replaced undropped
            if block is None:
                break
            self._pinned.append(block)

    def lookahead(self, seq: SeqState, k: int) -> int:
        """Extra blocks for k speculative tokens."""
        extra = self.pool.take_many(k)  # leak: a sequence that finished meanwhile returns before the table takes them
        if seq.finished or seq.seq_id not in self.tables:
            return 0
        self.tables[seq.seq_id].blocks.extend(extra)
        return len(extra)

    def close(self) -> None:
        for table in self.tables.values():
            table.release()
        self.tables.clear()
        for block in self._pinned:
            self.pool.drop(block)


class Scheduler:
    def __init__(self, manager: BlockManager, max_running: int = 64) -> None:
        self.manager, self.max_running = manager, max_running
        self.waiting: Deque[SeqState] = deque()
        self.running: List[SeqState] = []
        self.parked: List[SeqState] = []

    def set_system_prompt(self, tokens: Seq[int]) -> None:
        self.manager.pin_prefix(tokens)

    def retire(self, seq: SeqState) -> None:
        """For a sequence that is done, and for one whose client went away."""
        seq.finished = True
        for queue in (self.waiting, self.running, self.parked):
            if seq in queue:
                queue.remove(seq)
        self.manager.free(seq)

    def rebeam(self, pairs: List[Tuple[SeqState, SeqState]]) -> None:
        """Every (winner, loser): the loser goes on from the winner's cache."""
        for winner, loser in pairs:
            self.manager.fork(winner, loser)
            loser.tokens = list(winner.tokens)

    def _preempt(self, seq: SeqState) -> None:
        self.running.remove(seq)
        if self.manager.swap_out(seq) is not None:
            self.parked.append(seq)
            return
        self.manager.free(seq)
        self.waiting.appendleft(seq)

    def step(self) -> List[SeqState]:
        for seq in list(self.parked):
            if self.manager.swap_in(seq) is not None:
                self.running.append(self.parked.pop(self.parked.index(seq)))
        while self.waiting and len(self.running) < self.max_running:
            try:
                self.manager.allocate(self.waiting[0])
            except NoFreeBlocks:
                break
            self.running.append(self.waiting.popleft())
        for seq in list(self.running):
            try:
                self.manager.append_slot(seq)
            except NoFreeBlocks:
                self._preempt(seq)
        return self.running
