"""Paged key/value cache for a single-GPU decode engine.

Device blocks are reference counted so that forked sequences and cached
prefixes can sit on the same physical memory.  Host blocks only ever belong to
one sequence.
"""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterator, List, Optional, Tuple

logger = logging.getLogger(__name__)


class NoFreeBlocks(RuntimeError):
    pass


class PhysicalBlock:
    __slots__ = ("index", "refs", "digest", "filled")

    def __init__(self, index: int) -> None:
        self.index = index
        self.refs = 0
        self.digest: Optional[int] = None
        self.filled = 0


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int, device: str) -> None:
        self.block_size = block_size
        self.device = device
        self._free: Deque[PhysicalBlock] = deque(PhysicalBlock(i) for i in range(num_blocks))
        self._by_digest: Dict[int, PhysicalBlock] = {}

    def allocate(self) -> PhysicalBlock:
        if not self._free:
            raise NoFreeBlocks(f"{self.device}: all blocks in use")
        blk = self._free.popleft()  # clean: goes to the caller
        blk.refs = 1
        blk.filled = 0
        blk.digest = None
        return blk

    def share(self, blk: PhysicalBlock) -> PhysicalBlock:
        assert blk.refs > 0, blk
        blk.refs += 1
        return blk

    def lookup(self, digest: int) -> Optional[PhysicalBlock]:
        blk = self._by_digest.get(digest)
        if blk is None:
            return None
        return self.share(blk)  # clean: the reference goes to the caller

    def publish(self, digest: int, blk: PhysicalBlock) -> None:
        if digest not in self._by_digest:
            self._by_digest[digest] = blk
            blk.digest = digest

    def free(self, blk: PhysicalBlock) -> None:
        if blk.refs <= 0:
            raise ValueError(f"double free of block {blk.index}")
        blk.refs -= 1
        if blk.refs == 0:
            if blk.digest is not None:
                self._by_digest.pop(blk.digest, None)
            self._free.append(blk)


@dataclass
class Seq:
    seq_id: int
    tokens: List[int]
    max_tokens: int
    system_prompt: Optional[str] = None
    best_of: int = 1
    generated: int = 0
    lookahead: List[PhysicalBlock] = field(default_factory=list)


class KVManager:
    def __init__(self, gpu: BlockAllocator, host: BlockAllocator, max_seqs: int = 256) -> None:
        self.gpu = gpu
        self.host = host
        self.max_seqs = max_seqs
        self._tables: Dict[int, List[PhysicalBlock]] = {}
        self._swapped: Dict[int, List[PhysicalBlock]] = {}
        self._pins: Dict[str, List[PhysicalBlock]] = {}
        self.pending_copies: List[Tuple[int, int]] = []

    def _chunks(self, tokens: List[int]) -> Iterator[Tuple[int, List[int]]]:
        digest = 0
        for at in range(0, len(tokens), self.gpu.block_size):
            chunk = tokens[at:at + self.gpu.block_size]
            digest = hash((digest, tuple(chunk)))
            yield digest, chunk

    def _release(self, blocks: List[PhysicalBlock]) -> None:
        for blk in reversed(blocks):
            self.gpu.free(blk)
        blocks.clear()

    def _match_prefix(self, seq: Seq) -> List[PhysicalBlock]:
        matched: List[PhysicalBlock] = []
        for digest, _ in self._chunks(seq.tokens):
            blk = self.gpu.lookup(digest)  # leak: a hit that is only partly filled breaks out with its reference taken
            if blk is None:
                break
            if blk.filled < self.gpu.block_size:
                # Partial tail, it is going to be written by its owner.
                break
            matched.append(blk)
        return matched

    def admit(self, seq: Seq) -> bool:
        table = self._match_prefix(seq)  # clean: near miss, becomes the table of the sequence or is released in the handler
        hits = len(table)
        try:
            for digest, chunk in list(self._chunks(seq.tokens))[hits:]:
                blk = self.gpu.allocate()  # clean: appended at once, the handler releases the list
                blk.filled = len(chunk)
                table.append(blk)
                self.gpu.publish(digest, blk)
        except NoFreeBlocks:
            self._release(table)
            return False
        self._tables[seq.seq_id] = table
        return True

    def append_slot(self, seq: Seq) -> None:
        table = self._tables[seq.seq_id]
        last = table[-1]
        if last.filled == self.gpu.block_size:
            if not seq.lookahead:
                seq.lookahead.append(self.gpu.allocate())  # clean: near miss, moves over to the table of the sequence in the next line
            last = seq.lookahead.pop()
            table.append(last)
        elif last.refs > 1:
            fresh = self.gpu.allocate()  # clean: near miss, takes the place of the shared tail, whose reference is dropped
            fresh.filled = last.filled
            self.pending_copies.append((last.index, fresh.index))
            table[-1] = fresh
            self.gpu.free(last)
            last = fresh
        last.filled += 1

    def reserve_lookahead(self, seq: Seq, n: int) -> None:
        extra: List[PhysicalBlock] = []
        while len(extra) < n:
            extra.append(self.gpu.allocate())  # leak: running dry midway raises while the earlier ones are in a local list only
        seq.lookahead.extend(extra)

    def fork(self, parent: Seq, child: Seq) -> bool:
        table = [self.gpu.share(b) for b in self._tables[parent.seq_id]]  # leak: the max_seqs return drops the list
        if len(self._tables) >= self.max_seqs:
            return False
        self._tables[child.seq_id] = table
        return True

    def pin_prefix(self, name: str, seq: Seq) -> None:
        full = [b for b in self._tables[seq.seq_id] if b.filled == self.gpu.block_size]
        self._pins[name] = [self.gpu.share(b) for b in full]  # leak: a second pin under one name overwrites the list of the first

    def unpin(self, name: str) -> None:
        for blk in self._pins.pop(name, ()):
            self.gpu.free(blk)

    def swap_out(self, seq: Seq) -> bool:
        table = self._tables[seq.seq_id]
        if len(self.host._free) < len(table):
            return False
        saved = [self.host.allocate() for _ in table]  # leak: free_seq of a swapped sequence never looks into _swapped
        self._swapped[seq.seq_id] = saved
        self._release(self._tables.pop(seq.seq_id))
        self._release(seq.lookahead)
        return True

    def swap_in(self, seq: Seq) -> bool:
        saved = self._swapped[seq.seq_id]
        if len(self.gpu._free) < len(saved):
            return False
        table = [self.gpu.allocate() for _ in saved]  # clean: room was checked and the list becomes the table
        for src, dst in zip(saved, table):
            dst.filled = src.filled
        self._tables[seq.seq_id] = table
        for blk in self._swapped.pop(seq.seq_id):
            self.host.free(blk)
        return True

    def free_seq(self, seq: Seq) -> None:
        self._release(self._tables.pop(seq.seq_id, []))
        self._release(seq.lookahead)


class Scheduler:
    def __init__(self, kv: KVManager, lookahead: int = 2) -> None:
        self.kv = kv
        self.lookahead = lookahead
        self.waiting: Deque[Seq] = deque()
        self.running: List[Seq] = []
        self.swapped: Deque[Seq] = deque()
        self._next_id = 1 << 20

    def _admit(self) -> None:
        while self.waiting and self.kv.admit(self.waiting[0]):
            seq = self.waiting.popleft()
            self.running.append(seq)
            if seq.system_prompt:
                self.kv.pin_prefix(seq.system_prompt, seq)
            for _ in range(seq.best_of - 1):
                child = Seq(self._next_id, list(seq.tokens), seq.max_tokens)
                self._next_id += 1
                if not self.kv.fork(seq, child):
                    break
                self.running.append(child)
            try:
                self.kv.reserve_lookahead(seq, self.lookahead)
            except NoFreeBlocks:
                logger.debug("no lookahead for %d", seq.seq_id)

    def _preempt(self, victim: Seq) -> None:
        self.running.remove(victim)
        if self.kv.swap_out(victim):
            self.swapped.append(victim)
            return
        self.kv.free_seq(victim)
        self.waiting.appendleft(victim)

    def step(self) -> List[Seq]:
        while self.swapped and self.kv.swap_in(self.swapped[0]):
            self.running.append(self.swapped.popleft())
        if not self.swapped:
            self._admit()
        finished = []
        for seq in list(self.running):
            if seq not in self.running:
                continue
            try:
                self.kv.append_slot(seq)
            except NoFreeBlocks:
                self._preempt(self.running[-1])
                continue
            seq.generated += 1
            if seq.generated >= seq.max_tokens:
                self.running.remove(seq)
                self.kv.free_seq(seq)
                finished.append(seq)
        return finished

    def abort(self, seq_id: int) -> bool:
        for queue in (self.running, self.waiting, self.swapped):
            for seq in queue:
                if seq.seq_id == seq_id:
                    queue.remove(seq)
                    self.kv.free_seq(seq)
                    return True
        return False
