"""Paged KV cache with prefix sharing, copy-on-write forks, swapping and export."""
from __future__ import annotations

import enum
import hashlib
import itertools
from collections import OrderedDict, deque
from typing import Iterable

BLOCK_TOKENS = 16


class OutOfBlocks(RuntimeError):
    pass


class State(enum.Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    DONE = 3


class Block:
    __slots__ = ("idx", "refs", "digest")

    def __init__(self, idx: int):
        self.idx = idx
        self.refs = 0
        self.digest = None


class BlockPool:
    def __init__(self, count: int, name: str = "device"):
        self.name, self.count = name, count
        self._free: deque[Block] = deque(Block(i) for i in range(count))

    def available(self) -> int:
        return len(self._free)

    def take(self) -> Block:
        if not self._free:
            raise OutOfBlocks(self.name)
        blk = self._free.popleft()  # clean: handed to the caller
        blk.refs = 1
        blk.digest = None
        return blk

    def take_many(self, n: int) -> list[Block]:
        got: list[Block] = []
        while len(got) < n:
            if not self._free:
                raise OutOfBlocks(f"{self.name}: wanted {n}, had {len(got)}")
            blk = self._free.popleft()  # leak: the blocks popped so far go down with the local list when the pool runs dry
            blk.refs = 1
            blk.digest = None
            got.append(blk)
        return got

    def share(self, blk: Block) -> Block:
        assert blk.refs > 0, blk
        blk.refs += 1
        return blk

    def drop(self, blk: Block) -> None:
        blk.refs -= 1
        if blk.refs == 0:
            self._free.append(blk)


def block_digests(tokens: list[int]) -> list[str]:
    out, prev = [], b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        h = hashlib.sha1(prev)
        h.update(repr(tokens[start:start + BLOCK_TOKENS]).encode())
        prev = h.digest()
        out.append(prev.hex())
    return out


class Sequence:
    def __init__(self, seq_id: int, tokens: Iterable[int], max_new: int):
        self.seq_id, self.max_new = seq_id, max_new
        self.tokens = list(tokens)
        self.blocks: list[Block] = []
        self.state = State.WAITING

    def blocks_needed(self) -> int:
        return -(-len(self.tokens) // BLOCK_TOKENS)


class PrefixCache:
    def __init__(self, pool: BlockPool, capacity: int):
        self.pool = pool
        self.capacity = capacity
        self._map: OrderedDict[str, Block] = OrderedDict()

    def match(self, digests: list[str]) -> list[Block]:
        hit = []
        for d in digests:
            blk = self._map.get(d)
            if blk is None:
                break
            self._map.move_to_end(d)
            hit.append(self.pool.share(blk))  # clean: near miss, the break leaves with the list and the list is returned
        return hit

    def insert(self, digest: str, blk: Block) -> None:
        while len(self._map) >= self.capacity:
            _, old = self._map.popitem(last=False)
            self.pool.drop(old)
        self._map[digest] = self.pool.share(blk)  # leak: a digest that is present already is overwritten, its block is not dropped
        blk.digest = digest


class KVScheduler:
    def __init__(self, pool: BlockPool, host_pool: BlockPool, copier, max_running: int = 64):
        self.pool = pool
        self.host_pool = host_pool
        self.copier = copier
        self.max_running = max_running
        self.prefix = PrefixCache(pool, capacity=max(1, pool.count // 4))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.swapped: dict[int, tuple[Sequence, list[Block]]] = {}
        self.by_id: dict[int, Sequence] = {}
        self._exports: dict[int, list[Block]] = {}
        self._tickets = itertools.count(1)

    def enqueue(self, seq: Sequence) -> None:
        seq.blocks = self.prefix.match(block_digests(seq.tokens))  # leak: abort() of a sequence that still waits forgets its blocks
        self.by_id[seq.seq_id] = seq
        self.waiting.append(seq)

    def _admit(self, seq: Sequence) -> bool:
        need = seq.blocks_needed() - len(seq.blocks)
        if need > 0:
            try:
                fresh = self.pool.take_many(need)  # leak: the return for a full batch comes after the take
            except OutOfBlocks:
                return False
            if len(self.running) >= self.max_running:
                return False
            seq.blocks.extend(fresh)
        seq.state = State.RUNNING
        self.running.append(seq)
        return True

    def _grow(self, seq: Sequence) -> bool:
        if len(seq.tokens) <= len(seq.blocks) * BLOCK_TOKENS:
            return True
        while True:
            try:
                seq.blocks.append(self.pool.take())  # clean: near miss, goes straight into the table of the sequence
                return True
            except OutOfBlocks:
                victims = [s for s in self.running if s is not seq]
                if not victims:
                    return False
                self._preempt(victims[-1])

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        n = len(seq.blocks)
        if 0 < n <= self.host_pool.available():
            host = self.host_pool.take_many(n)  # clean: near miss, kept in the swapped table, dropped by swap_in and abort
            for d, h in zip(seq.blocks, host):
                self.copier.d2h(d.idx, h.idx)
            self.swapped[seq.seq_id] = (seq, host)
            seq.state = State.SWAPPED
        else:
            seq.state = State.WAITING
            self.waiting.appendleft(seq)
        self._free_blocks(seq)

    def swap_in(self, seq_id: int) -> bool:
        seq, host = self.swapped[seq_id]
        if self.pool.available() < len(host):
            return False
        dev = self.pool.take_many(len(host))  # clean: becomes the table of the sequence
        for h, d in zip(host, dev):
            self.copier.h2d(h.idx, d.idx)
            self.host_pool.drop(h)
        del self.swapped[seq_id]
        seq.blocks = dev
        seq.state = State.RUNNING
        self.running.append(seq)
        return True

    def fork(self, parent: Sequence, child_id: int) -> Sequence:
        child = Sequence(child_id, parent.tokens, parent.max_new)
        for blk in parent.blocks:
            child.blocks.append(self.pool.share(blk))  # leak: the last one is replaced below without being dropped
        if len(parent.tokens) % BLOCK_TOKENS:
            fresh = self.pool.take()  # clean: replaces the tail in the child's table
            self.copier.d2d(parent.blocks[-1].idx, fresh.idx)
            child.blocks[-1] = fresh
        child.state = State.RUNNING
        self.by_id[child_id] = child
        self.running.append(child)
        return child

    def _free_blocks(self, seq: Sequence) -> None:
        for blk in reversed(seq.blocks):
            self.pool.drop(blk)
        seq.blocks = []

    def finish(self, seq: Sequence) -> None:
        for d, blk in zip(block_digests(seq.tokens), seq.blocks):
            self.prefix.insert(d, blk)
        self.running.remove(seq)
        self._free_blocks(seq)
        seq.state = State.DONE
        self.by_id.pop(seq.seq_id, None)

    def abort(self, seq_id: int) -> None:
        seq = self.by_id.pop(seq_id, None)
        if seq is None:
            return
        if seq.state is State.RUNNING:
            self.running.remove(seq)
            self._free_blocks(seq)
        elif seq.state is State.SWAPPED:
            _, host = self.swapped.pop(seq_id)
            for h in host:
                self.host_pool.drop(h)
        else:
            self.waiting.remove(seq)
        seq.state = State.DONE

    def pin_for_export(self, seq: Sequence, count: int) -> int:
        pinned = [self.pool.share(b) for b in seq.blocks[:count]]  # clean: near miss, the ticket's entry owns them until export_done()
        self._exports[ticket := next(self._tickets)] = pinned
        return ticket

    def export_done(self, ticket: int) -> None:
        for blk in self._exports.pop(ticket, ()):
            self.pool.drop(blk)

    def step(self) -> list[Sequence]:
        while self.waiting and self._admit(self.waiting[0]):
            self.waiting.popleft()
        for seq in list(self.running):
            if seq.state is State.RUNNING and not self._grow(seq):
                self._preempt(seq)
        return list(self.running)


def migrate(sched: KVScheduler, seq_id: int, sender) -> bool:
    seq = sched.by_id[seq_id]
    ticket = sched.pin_for_export(seq, len(seq.blocks))  # clean: every way out ends the export
    try:
        sender.send(seq_id, [b.idx for b in seq.blocks])
    except ConnectionError:
        sched.export_done(ticket)
        return False
    sched.export_done(ticket)
    return True
