"""Paged KV-cache bookkeeping for the on-policy rollout engine.

The engine keeps the token state; this file only decides which physical block
belongs to which sequence, and who is preempted when the device runs full.
"""
from __future__ import annotations

import itertools
import logging
import math
import time
from collections import OrderedDict, deque

log = logging.getLogger("rollout.kv")

_ids = itertools.count()


class OutOfBlocks(RuntimeError):
    pass


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int = 16, label: str = "device"):
        self.block_size = block_size
        self.label = label
        self.peak = 0
        self._total = num_blocks
        self._free = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise OutOfBlocks(f"{self.label}: no free block of {self._total}")
        blk = self._free.popleft()  # clean: returned to the caller with one reference
        self._refs[blk] = 1
        self.peak = max(self.peak, self._total - len(self._free))
        return blk

    def take_many(self, n: int) -> list[int]:
        got = []
        for _ in range(n):
            got.append(self.take())  # leak: a later take() raises OutOfBlocks and the blocks in got are lost
        return got

    def share(self, blk: int) -> int:
        self._refs[blk] += 1  # clean: the reference belongs to the caller
        return blk

    def give(self, blk: int) -> None:
        self._refs[blk] -= 1
        if self._refs[blk] == 0:
            self._free.append(blk)

    def give_many(self, blks) -> None:
        for b in blks:
            self.give(b)


class PrefixCache:
    """Maps the hash of a full block of tokens to the block that holds it."""

    def __init__(self, pool: BlockPool, capacity: int):
        self.pool = pool
        self.capacity = capacity
        self.hits = 0
        self.lookups = 0
        self._entries: OrderedDict[int, int] = OrderedDict()

    def match(self, hashes) -> list[int]:
        found = []
        for h in hashes:
            self.lookups += 1
            blk = self._entries.get(h)
            if blk is None:
                break
            self.hits += 1
            self._entries.move_to_end(h)
            found.append(self.pool.share(blk))  # clean: the list goes to the caller
        return found

    def insert(self, h: int, blk: int) -> None:
        if h in self._entries:
            return
        self._entries[h] = self.pool.share(blk)  # clean: near miss, the key is absent and eviction or clear() gives it back
        while len(self._entries) > self.capacity:
            _, old = self._entries.popitem(last=False)
            self.pool.give(old)

    def refresh(self, h: int, blk: int) -> None:
        """After a weight update the prefix is recomputed into a new block."""
        self._entries[h] = self.pool.share(blk)  # leak: the block that stood under this hash is overwritten
        self._entries.move_to_end(h)

    def clear(self) -> None:
        self.pool.give_many(self._entries.values())
        self._entries.clear()


class Sequence:
    def __init__(self, prompt: list[int], max_new: int):
        self.seq_id = next(_ids)
        self.prompt = prompt
        self.output: list[int] = []
        self.max_new = max_new
        self.blocks: list[int] = []
        self.cancelled = False
        self.born = time.monotonic()

    def __len__(self):
        return len(self.prompt) + len(self.output)

    def blocks_needed(self, bs: int) -> int:
        return math.ceil((len(self) + 1) / bs)

    def hashes(self, bs: int):
        h = 0
        for i in range(0, len(self.prompt) - bs, bs):
            h = hash((h, tuple(self.prompt[i:i + bs])))
            yield h


class Scheduler:
    def __init__(self, model, device: BlockPool, host: BlockPool, watermark: int = 8):
        self.model = model
        self.pool = device
        self.host = host
        self.watermark = watermark
        self.cache = PrefixCache(device, capacity=1024)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.swapped: dict[int, tuple[Sequence, list[int]]] = {}

    def submit(self, prompt, max_new=512) -> int:
        seq = Sequence(prompt, max_new)
        self.waiting.append(seq)
        return seq.seq_id

    def warm_up(self) -> None:
        blks = self.pool.take_many(4)  # clean: finally gives all four back
        try:
            self.model.capture_graphs(blks)
        finally:
            self.pool.give_many(blks)

    def admit(self) -> None:
        bs = self.pool.block_size
        while self.waiting:
            seq = self.waiting[0]
            if seq.cancelled:
                self.waiting.popleft()
                continue
            prefix = self.cache.match(seq.hashes(bs))  # leak: the break below forgets the shared references
            missing = seq.blocks_needed(bs) - len(prefix)
            if missing > self.pool.available - self.watermark:
                break
            self.waiting.popleft()
            seq.blocks = prefix + self.pool.take_many(missing)  # clean: the sequence is registered and _release gives them back
            self.running[seq.seq_id] = seq
            for h, blk in zip(seq.hashes(bs), seq.blocks):
                self.cache.insert(h, blk)

    def grow(self, seq: Sequence) -> bool:
        if len(seq) % self.pool.block_size:
            return True
        while True:
            try:
                seq.blocks.append(self.pool.take())  # clean: near miss, it joins the block list that _release gives back
                return True
            except OutOfBlocks:
                victim = max(self.running.values(), key=lambda s: s.seq_id)
                log.info("preempting %d for %d", victim.seq_id, seq.seq_id)
                self._preempt(victim)
                if victim is seq:
                    return False

    def fork(self, parent: Sequence, n: int) -> list[Sequence]:
        """n siblings for group-relative advantages; the tail block is private."""
        children = []
        for _ in range(n):
            child = Sequence(parent.prompt, parent.max_new)
            for b in parent.blocks[:-1]:
                child.blocks.append(self.pool.share(b))  # leak: the child is dropped when its tail block cannot be taken
            try:
                child.blocks.append(self.pool.take())  # clean: the child is registered at once
            except OutOfBlocks:
                log.warning("only %d of %d siblings", len(children), n)
                break
            self.running[child.seq_id] = child
            children.append(child)
        return children

    def speculate(self, seq: Sequence, k: int) -> int:
        scratch = self.pool.take_many(k)  # leak: no draft tokens, early return with the scratch blocks held
        draft = self.model.draft(seq, scratch)
        if not draft:
            return 0
        accepted = self.model.verify(seq, draft)
        keep = math.ceil(accepted / self.pool.block_size)
        seq.blocks.extend(scratch[:keep])
        self.pool.give_many(scratch[keep:])
        return accepted

    def swap_out(self, seq: Sequence) -> None:
        host_blks = self.host.take_many(len(seq.blocks))  # leak: swap_in drops the entry before a take_many that may raise
        self.model.copy_out(seq.blocks, host_blks)
        self._release(seq)
        self.running.pop(seq.seq_id, None)
        self.swapped[seq.seq_id] = (seq, host_blks)

    def swap_in(self, seq_id: int) -> Sequence:
        seq, host_blks = self.swapped.pop(seq_id)
        seq.blocks = self.pool.take_many(len(host_blks))  # clean: the sequence owns them and goes back to running
        self.model.copy_in(host_blks, seq.blocks)
        self.host.give_many(host_blks)
        self.running[seq_id] = seq
        return seq

    def step(self) -> list[Sequence]:
        self.admit()
        done = []
        for seq in list(self.running.values()):
            if seq.seq_id not in self.running or not self.grow(seq):
                continue
            tok = self.model.decode(seq)
            seq.output.append(tok)
            if tok == self.model.eos or len(seq.output) >= seq.max_new or seq.cancelled:
                self.running.pop(seq.seq_id)
                self._release(seq)
                done.append(seq)
        return done

    def _preempt(self, seq: Sequence) -> None:
        self.running.pop(seq.seq_id, None)
        self._release(seq)
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        self.pool.give_many(seq.blocks)
        seq.blocks = []

    def shutdown(self) -> None:
        for seq in self.running.values():
            self._release(seq)
        self.running.clear()
        for _, host_blks in self.swapped.values():
            self.host.give_many(host_blks)
        self.swapped.clear()
        self.cache.clear()
        log.info("kv peak %d, prefix hits %d/%d", self.pool.peak, self.cache.hits, self.cache.lookups)
