"""Paged KV cache: block pool, prefix cache and the part of the scheduler that moves blocks around.

A Block is reference counted. Whoever stores a block in a structure that outlives the call owns one
reference and gives it back with BlockPool.free().
"""
from __future__ import annotations

import logging
from collections import OrderedDict, deque

logger = logging.getLogger("kv")
WAITING, RUNNING, SWAPPED, DONE = range(4)


class OutOfBlocks(Exception):
    pass


class Block:
    __slots__ = ("bid", "refs", "digest")

    def __init__(self, bid: int):
        self.bid = bid
        self.refs = 0
        self.digest = None


class BlockPool:
    def __init__(self, n: int, name: str):
        self.name = name
        self._free: list[Block] = [Block(i) for i in range(n)]

    available = property(lambda self: len(self._free))

    def alloc(self) -> Block:
        if not self._free:
            raise OutOfBlocks(self.name)
        blk = self._free.pop()  # clean: handed to the caller with one reference
        blk.refs = 1
        blk.digest = None
        return blk

    def alloc_run(self, n: int) -> list[Block]:
        """n blocks with consecutive ids, which the fused copy kernel wants."""
        self._free.sort(key=lambda b: b.bid)
        run: list[Block] = []
        while self._free and len(run) < n:
            blk = self._free.pop()  # leak: the blocks before a gap, or a run that stays too short, do not go back
            if run and blk.bid != run[-1].bid - 1:
                run = [blk]
                continue
            run.append(blk)
        if len(run) < n:
            raise OutOfBlocks(self.name)
        for blk in run:
            blk.refs = 1
        return run[::-1]

    def share(self, blk: Block) -> Block:
        assert blk.refs > 0
        blk.refs += 1
        return blk

    def free(self, blk: Block) -> None:
        blk.refs -= 1
        if blk.refs == 0:
            self._free.append(blk)


class PrefixCache:
    def __init__(self, pool: BlockPool, limit: int):
        self._pool = pool
        self._limit = limit
        self._table: OrderedDict[int, Block] = OrderedDict()

    def match(self, digests: list[int]) -> list[Block]:
        """The longest cached prefix. The caller owns a reference to each block of the answer."""
        found = []
        for d in digests:
            blk = self._table.get(d)
            if blk is None:
                break
            found.append(self._pool.share(blk))  # clean: handed to the caller in the list
        return found

    def insert(self, digest: int, blk: Block) -> None:
        blk.digest = digest
        self._table[digest] = self._pool.share(blk)  # leak: an entry with the same digest is overwritten, its reference is lost
        while len(self._table) > self._limit:
            _, old = self._table.popitem(last=False)
            self._pool.free(old)

    def clear(self) -> None:
        for blk in self._table.values():
            self._pool.free(blk)
        self._table.clear()


class Sequence:
    def __init__(self, sid: int, tokens: list[int], block_size: int):
        self.sid = sid
        self.tokens = list(tokens)
        self.block_size = block_size
        self.state = WAITING
        self.blocks: list[Block] = []
        self.host_blocks: list[Block] = []

    def digests(self) -> list[int]:
        out, h = [], 0
        for i in range(0, len(self.tokens) - self.block_size + 1, self.block_size):
            h = hash((h, tuple(self.tokens[i:i + self.block_size])))
            out.append(h)
        return out

    needed = property(lambda self: -(-len(self.tokens) // self.block_size))


class Scheduler:
    def __init__(self, device_blocks: int, host_blocks: int, block_size: int = 16, watermark: int = 4):
        self.gpu = BlockPool(device_blocks, "gpu")
        self.cpu = BlockPool(host_blocks, "cpu")
        self.cache = PrefixCache(self.gpu, device_blocks // 4)
        self.block_size = block_size
        self.watermark = watermark
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.swapped: deque[Sequence] = deque()
        self.copies: list[tuple[int, int]] = []

    def admit(self, seq: Sequence) -> bool:
        seq.blocks = self.cache.match(seq.digests())  # leak: a failed admission resets the list below
        try:
            while len(seq.blocks) < seq.needed:
                seq.blocks.append(self.gpu.alloc())  # leak: the same, the new blocks are dropped by the reset
        except OutOfBlocks:
            logger.debug("seq %d has to wait (%d free)", seq.sid, self.gpu.available)
            seq.blocks = []
            self.waiting.appendleft(seq)
            return False
        seq.state = RUNNING
        self.running.append(seq)
        return True

    def step(self) -> None:
        while self.waiting and self.gpu.available > self.watermark:
            if not self.admit(self.waiting.popleft()):
                break
        for seq in list(self.running):
            if seq.state is RUNNING and len(seq.blocks) < seq.needed:
                self._grow(seq)

    def _grow(self, seq: Sequence) -> None:
        while True:
            try:
                blk = self.gpu.alloc()  # clean: near miss, joins seq.blocks and is freed by finish or preempt
            except OutOfBlocks:
                victim = self.running[-1]
                self.preempt(victim)
                if victim is seq:
                    return
                continue
            seq.blocks.append(blk)
            return

    def _swap_out(self, seq: Sequence) -> list[Block]:
        dst = []
        for src in seq.blocks:
            host = self.cpu.alloc()  # leak: when the host pool runs dry half-way the earlier ones are lost, preempt handles the exception
            self.copies.append((src.bid, host.bid))
            dst.append(host)
        return dst

    def preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        try:
            seq.host_blocks = self._swap_out(seq)  # clean: freed by _swap_in or abort
            seq.state = SWAPPED
            self.swapped.append(seq)
        except OutOfBlocks:
            logger.info("seq %d is recomputed later", seq.sid)
            seq.state = WAITING
            self.waiting.appendleft(seq)
        self._drop(seq)

    def _swap_in(self, seq: Sequence) -> bool:
        if self.gpu.available < len(seq.host_blocks) + self.watermark:
            return False
        for host in seq.host_blocks:
            blk = self.gpu.alloc()  # clean: near miss, availability is checked above, joins seq.blocks
            self.copies.append((host.bid, blk.bid))
            seq.blocks.append(blk)
            self.cpu.free(host)
        seq.host_blocks = []
        seq.state = RUNNING
        self.running.append(seq)
        return True

    def resume(self) -> int:
        n = 0
        while self.swapped:
            seq = self.swapped.popleft()
            if not self._swap_in(seq):
                self.swapped.appendleft(seq)
                break
            n += 1
        return n

    def fork(self, parent: Sequence, sid: int) -> Sequence:
        child = Sequence(sid, parent.tokens, self.block_size)
        child.blocks = [self.gpu.share(b) for b in parent.blocks[:-1]]  # leak: the copy of the last block may raise, beam_step handles it and child is gone
        last = self.gpu.alloc()  # clean: joins child.blocks
        self.copies.append((parent.blocks[-1].bid, last.bid))
        child.blocks.append(last)
        child.state = RUNNING
        self.running.append(child)
        return child

    def beam_step(self, parent: Sequence, width: int, next_sid: int) -> list[Sequence]:
        beams = [parent]
        for i in range(width - 1):
            try:
                beams.append(self.fork(parent, next_sid + i))
            except OutOfBlocks:
                break
        return beams

    def _drop(self, seq: Sequence) -> None:
        for blk in reversed(seq.blocks):
            self.gpu.free(blk)
        seq.blocks = []

    def finish(self, seq: Sequence) -> None:
        for digest, blk in zip(seq.digests(), seq.blocks):
            self.cache.insert(digest, blk)
        self._drop(seq)
        seq.state = DONE
        self.running.remove(seq)

    def abort(self, seq: Sequence) -> None:
        if seq.state is SWAPPED:
            self.swapped.remove(seq)
            for host in seq.host_blocks:
                self.cpu.free(host)
            seq.host_blocks = []
        elif seq.state is RUNNING:
            self.running.remove(seq)
            self._drop(seq)
        else:
            self.waiting.remove(seq)
        seq.state = DONE

    def defrag(self, n: int) -> int:
        try:
            run = self.gpu.alloc_run(n)  # clean: all freed again below
        except OutOfBlocks:
            return -1
        base = run[0].bid
        for blk in run:
            self.gpu.free(blk)
        return base
