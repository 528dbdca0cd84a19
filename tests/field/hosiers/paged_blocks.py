"""Paged KV block manager: admission, forking, swapping and sliding-window trimming."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Optional


class BlockAllocator:
    """Reference-counted fixed-size block allocator for one device."""

    def __init__(self, device: str, num_blocks: int, block_size: int) -> None:
        self.device = device
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        blk = self._free.popleft()
        self._refs[blk] = 1
        return blk

    def fork(self, blk: int) -> int:
        self._refs[blk] += 1
        return blk

    def free(self, blk: int) -> None:
        self._refs[blk] -= 1
        if self._refs[blk] == 0:
            self._free.append(blk)

    def ref_count(self, blk: int) -> int:
        return self._refs[blk]


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    computed: int = 0
    hashes: list[int] = field(default_factory=list)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class BlockManager:
    def __init__(self, gpu: BlockAllocator, cpu: BlockAllocator, watermark: int) -> None:
        self.gpu = gpu
        self.cpu = cpu
        self.watermark = watermark
        self.tables: dict[int, list[int]] = {}
        self.swapped: dict[int, list[int]] = {}
        self.copy_ops: list[tuple[int, int]] = []

    # ---- admission -------------------------------------------------------

    def admit(self, seq: Sequence) -> bool:
        need = cdiv(len(seq.tokens), self.gpu.block_size)
        table: list[int] = []
        for _ in range(need):
            blk = self.gpu.allocate()  # leak: a dry pool midway returns False and drops the partial table
            if blk is None:
                return False
            table.append(blk)
        self.tables[seq.seq_id] = table
        seq.computed = 0
        return True

    def admit_chunk(self, seq: Sequence, num_tokens: int) -> bool:
        table = self.tables.setdefault(seq.seq_id, [])
        have = len(table)
        want = cdiv(seq.computed + num_tokens, self.gpu.block_size)
        while len(table) < want:
            blk = self.gpu.allocate()  # clean: appended to the table, popped and freed on failure
            if blk is None:
                while len(table) > have:
                    self.gpu.free(table.pop())
                return False
            table.append(blk)
        seq.computed += num_tokens
        return True

    def append_slot(self, seq: Sequence) -> Optional[int]:
        table = self.tables[seq.seq_id]
        if len(seq.tokens) % self.gpu.block_size != 0:
            return table[-1]
        if self.gpu.num_free <= self.watermark:
            return None
        tail = self.gpu.allocate()  # clean: kept in the sequence's table, freed by release
        if tail is not None:
            table.append(tail)
        return tail

    def can_grow(self) -> bool:
        probe = self.gpu.allocate()  # clean: near miss, only None skips the free
        ok = probe is not None and self.gpu.num_free >= self.watermark
        if probe is not None:
            self.gpu.free(probe)
        return ok

    # ---- sharing ---------------------------------------------------------

    def fork_sequence(self, parent: Sequence, child: Sequence) -> None:
        table = []
        for blk in self.tables[parent.seq_id]:
            table.append(self.gpu.fork(blk))  # clean: the child's table owns the reference
        self.tables[child.seq_id] = table

    def make_writable(self, seq: Sequence) -> bool:
        table = self.tables[seq.seq_id]
        last = table[-1]
        if self.gpu.ref_count(last) == 1:
            return True
        fresh = self.gpu.allocate()  # clean: replaces the shared block, whose reference is dropped
        if fresh is None:
            return False
        self.copy_ops.append((last, fresh))
        table[-1] = fresh
        self.gpu.free(last)
        return True

    def fingerprint(self, seq: Sequence) -> int:
        held = [self.gpu.fork(b) for b in self.tables[seq.seq_id]]  # leak: short tables return early
        if len(held) < 2:
            return 0
        digest = 0
        for i, blk in enumerate(held):
            digest = hash((digest, blk, tuple(seq.tokens[i * self.gpu.block_size:][:self.gpu.block_size])))
        for blk in held:
            self.gpu.free(blk)
        return digest

    def shared_prefix(self, a: Sequence, b: Sequence) -> int:
        n = 0
        for x, y in zip(self.tables[a.seq_id], self.tables[b.seq_id]):
            pin = self.gpu.fork(x)  # leak: the break at the first mismatch keeps the pin
            if x != y:
                break
            n += 1
            self.gpu.free(pin)
        return n

    # ---- swapping --------------------------------------------------------

    def swap_out(self, seq: Sequence) -> list[tuple[int, int]]:
        table = self.tables[seq.seq_id]
        if self.cpu.num_free < len(table):
            return []
        host: list[int] = []
        plan = []
        for blk in table:
            slot = self.cpu.allocate()  # leak: swap_in pops the host table and never frees it
            host.append(slot)
            plan.append((blk, slot))
        self.swapped[seq.seq_id] = host
        for blk in self.tables.pop(seq.seq_id):
            self.gpu.free(blk)
        return plan

    def swap_in(self, seq: Sequence) -> list[tuple[int, int]]:
        if self.gpu.num_free < len(self.swapped[seq.seq_id]) + self.watermark:
            return []
        host = self.swapped.pop(seq.seq_id)
        table = []
        for _ in host:
            blk = self.gpu.allocate()  # clean: near miss, room was checked and the table takes it
            table.append(blk)
        self.tables[seq.seq_id] = table
        return list(zip(host, table))

    # ---- end of life -----------------------------------------------------

    def trim_window(self, seq: Sequence, window: int) -> int:
        table = self.tables[seq.seq_id]
        keep = cdiv(window, self.gpu.block_size) + 1
        dropped = 0
        while len(table) > keep:
            self.gpu.free(table.pop(0))
            dropped += 1
        return dropped

    def release(self, seq: Sequence) -> None:
        for blk in self.tables.pop(seq.seq_id, []):
            self.gpu.free(blk)
        seq.hashes.clear()


def warm_up(alloc: BlockAllocator, rounds: int, touch) -> None:
    """Touch some blocks so that the first request does not pay for page faults."""
    blk = None
    for i in range(rounds):
        blk = alloc.allocate()  # leak: each round rebinds blk, only the last one is freed
        if blk is None:
            break
        touch(blk, i)
    if blk is not None:
        alloc.free(blk)
