"""Paged KV cache: block allocator, sequences and the swap path."""
from dataclasses import dataclass, field
from typing import Dict, List, Optional


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self._free: List[int] = list(range(num_blocks))
        self._used = set()

    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.pop()  # clean: marked used and returned
        self._used.add(block)
        return block

    def allocate_n(self, n: int) -> List[int]:
        if len(self._free) < n:
            return []
        blocks = [self._free.pop() for _ in range(n)]  # clean: the whole list is marked used and returned
        self._used.update(blocks)
        return blocks

    def free(self, block: int) -> None:
        self._used.discard(block)
        self._free.append(block)

    def free_all(self, blocks: List[int]) -> None:
        for block in blocks:
            self.free(block)

    def defragment(self, order) -> int:
        moved = 0
        for src in sorted(self._used, key=order):
            if not self._free:
                break
            dst = self._free.pop()  # leak: when dst is not lower it is neither used nor put back
            if dst >= src:
                continue
            self._used.remove(src)
            self._used.add(dst)
            self._free.insert(0, src)
            moved += 1
        return moved


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    blocks: List[int] = field(default_factory=list)
    swapped: bool = False


class BlockManager:
    def __init__(self, gpu: BlockAllocator, cpu: BlockAllocator):
        self._gpu = gpu
        self._cpu = cpu
        self._tables: Dict[int, List[int]] = {}
        self._host: Dict[int, List[int]] = {}
        self._scratch: Dict[int, int] = {}

    def _needed(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // self._gpu.block_size)

    def admit(self, seq: Sequence) -> bool:
        blocks = self._gpu.allocate_n(self._needed(seq))  # clean: kept in the table that finish empties
        if not blocks:
            return False
        self._tables[seq.seq_id] = blocks
        return True

    def admit_incremental(self, seq: Sequence) -> bool:
        got: List[int] = []
        for _ in range(self._needed(seq)):
            block = self._gpu.allocate()  # clean: near miss, earlier blocks are rolled back when one is missing
            if block is None:
                self._gpu.free_all(got)
                return False
            got.append(block)
        self._tables[seq.seq_id] = got
        return True

    def append_slot(self, seq: Sequence) -> bool:
        table = self._tables[seq.seq_id]
        if len(seq.tokens) % self._gpu.block_size:
            return True
        block = self._gpu.allocate()  # clean: appended to the table
        if block is None:
            return False
        table.append(block)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        table = self._tables[parent.seq_id]
        copied = self._gpu.allocate_n(len(table))  # leak: lost when no scratch block is left
        if not copied:
            return False
        scratch = self._gpu.allocate()  # clean: kept per sequence and freed in finish
        if scratch is None:
            return False
        self._tables[child.seq_id] = copied
        self._scratch[child.seq_id] = scratch
        return True

    def swap_out(self, seq: Sequence) -> bool:
        table = self._tables.pop(seq.seq_id)
        host = self._cpu.allocate_n(len(table))  # clean: near miss, the failing branch only restores the device table
        if not host:
            self._tables[seq.seq_id] = table
            return False
        self._host[seq.seq_id] = host
        self._gpu.free_all(table)
        seq.swapped = True
        return True

    def swap_in(self, seq: Sequence) -> bool:
        host = self._host[seq.seq_id]
        device = self._gpu.allocate_n(len(host))  # clean: becomes the table again
        if not device:
            return False
        self._tables[seq.seq_id] = device
        self._cpu.free_all(self._host.pop(seq.seq_id))
        seq.swapped = False
        return True

    def recompute(self, seq: Sequence) -> bool:
        current = self._tables[seq.seq_id]
        fresh = self._gpu.allocate_n(max(len(current), self._needed(seq)))  # leak: the store drops the table the sequence already had
        if not fresh:
            return False
        self._tables[seq.seq_id] = fresh
        seq.blocks = list(fresh)
        return True

    def finish(self, seq: Sequence) -> None:
        self._gpu.free_all(self._tables.pop(seq.seq_id, []))
        self._cpu.free_all(self._host.pop(seq.seq_id, []))
        scratch = self._scratch.pop(seq.seq_id, None)
        if scratch is not None:
            self._gpu.free(scratch)


def warmup(allocator: BlockAllocator, rounds: int) -> int:
    """Touch the allocator so that first requests do not pay for page faults."""
    peak = 0
    blocks: List[int] = []
    for n in range(1, rounds + 1):
        blocks = allocator.allocate_n(n)  # leak: each round rebinds the list, only the last one is freed
        peak = max(peak, len(blocks))
    allocator.free_all(blocks)
    return peak


def probe(allocator: BlockAllocator, limit: int) -> int:
    held: List[int] = []
    while len(held) < limit:
        block = allocator.allocate()  # clean: near miss, the break leaves with nothing new and the rest is freed below
        if block is None:
            break
        held.append(block)
    allocator.free_all(held)
    return len(held)
