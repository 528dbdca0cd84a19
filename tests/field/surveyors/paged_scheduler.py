"""Continuous batching scheduler over a paged KV cache with swap space."""
from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Optional


class SeqStatus(enum.Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3


@dataclass
class PhysicalBlock:
    number: int
    ref_count: int = 0


@dataclass
class Sequence:
    seq_id: int
    token_ids: list[int]
    status: SeqStatus = SeqStatus.WAITING
    computed: int = 0


@dataclass
class SequenceGroup:
    request_id: str
    seqs: list[Sequence] = field(default_factory=list)


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self.free_blocks = deque(PhysicalBlock(i) for i in range(num_blocks))

    def allocate(self) -> PhysicalBlock:
        block = self.free_blocks.popleft()
        block.ref_count = 1
        return block

    def free(self, block: PhysicalBlock) -> None:
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_blocks.append(block)

    def num_free(self) -> int:
        return len(self.free_blocks)


BlockTable = list[PhysicalBlock]


class BlockSpaceManager:
    def __init__(self, block_size: int, gpu: BlockAllocator, cpu: BlockAllocator, watermark: int) -> None:
        self.block_size = block_size
        self.gpu = gpu
        self.cpu = cpu
        self.watermark = watermark
        self.block_tables: dict[int, BlockTable] = {}
        self.cpu_tables: dict[int, BlockTable] = {}
        self.draft_tables: dict[int, BlockTable] = {}

    def blocks_needed(self, seq: Sequence) -> int:
        return -(-len(seq.token_ids) // self.block_size)

    def allocate_prompt(self, seq: Sequence) -> bool:
        needed = self.blocks_needed(seq)
        if self.gpu.num_free() - needed < self.watermark:
            return False
        table: BlockTable = []
        for _ in range(needed):
            table.append(self.gpu.allocate())  # clean: owned by block_tables, free_seq gives every block back
        self.block_tables[seq.seq_id] = table
        return True

    def append_slot(self, seq: Sequence) -> Optional[tuple[int, int]]:
        table = self.block_tables[seq.seq_id]
        if len(table) < self.blocks_needed(seq):
            table.append(self.gpu.allocate())  # clean: near miss, the table is the one kept in block_tables
            return None
        last = table[-1]
        if last.ref_count == 1:
            return None
        fresh = self.gpu.allocate()  # clean: near miss, replaces the shared last block whose reference is dropped
        table[-1] = fresh
        self.gpu.free(last)
        return last.number, fresh.number

    def append_lookahead(self, seq: Sequence, num_slots: int) -> int:
        granted = 0
        extra: BlockTable = []
        while granted < num_slots and self.gpu.num_free() > 0:
            extra.append(self.gpu.allocate())  # clean: near miss, the draft table is extended with it, drop_lookahead frees all
            granted += self.block_size
        self.draft_tables.setdefault(seq.seq_id, []).extend(extra)
        return granted

    def drop_lookahead(self, seq: Sequence) -> None:
        for block in self.draft_tables.pop(seq.seq_id, []):
            self.gpu.free(block)

    def swap_out(self, seq: Sequence) -> dict[int, int]:
        mapping: dict[int, int] = {}
        table = self.block_tables.pop(seq.seq_id)
        target: BlockTable = []
        for block in table:
            host = self.cpu.allocate()  # leak: abort of a swapped group frees only block_tables, its cpu table stays
            mapping[block.number] = host.number
            target.append(host)
            self.gpu.free(block)
        self.cpu_tables[seq.seq_id] = target
        return mapping

    def swap_in(self, seq: Sequence) -> Optional[dict[int, int]]:
        source = self.cpu_tables[seq.seq_id]
        fetched: BlockTable = []
        for _ in source:
            if self.gpu.num_free() == 0:
                for block in fetched:
                    self.gpu.free(block)
                return None
            fetched.append(self.gpu.allocate())  # clean: near miss, the partial list is rolled back before the None
        mapping = {}
        for host, block in zip(source, fetched):
            mapping[host.number] = block.number
            self.cpu.free(host)
        del self.cpu_tables[seq.seq_id]
        self.block_tables[seq.seq_id] = fetched
        return mapping

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        if not self.gpu.num_free():
            return False
        tail = self.gpu.allocate()  # leak: no owner when the parent table is empty and fork answers False
        table = self.block_tables.get(parent.seq_id)
        if not table:
            return False
        shared = table[:-1]
        for block in shared:
            block.ref_count += 1
        self.block_tables[child.seq_id] = shared + [tail]
        return True

    def reserve_for_profile(self, count: int) -> int:
        held = [self.gpu.allocate() for _ in range(min(count, self.gpu.num_free()))]  # leak: only every block but the first is given back
        peak = len(held)
        for block in held[1:]:
            self.gpu.free(block)
        return peak

    def free_seq(self, seq: Sequence) -> None:
        for block in self.block_tables.pop(seq.seq_id, []):
            self.gpu.free(block)


class Scheduler:
    def __init__(self, manager: BlockSpaceManager) -> None:
        self.manager = manager
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []
        self.swapped: deque[SequenceGroup] = deque()

    def admit(self) -> list[SequenceGroup]:
        admitted: list[SequenceGroup] = []
        while self.waiting:
            seq = self.waiting[0].seqs[0]
            if not self.manager.allocate_prompt(seq):  # clean: near miss, a False took nothing and a True goes to running, which finish and abort free
                break
            group = self.waiting.popleft()
            seq.status = SeqStatus.RUNNING
            self.running.append(group)
            admitted.append(group)
        return admitted

    def step(self, group: SequenceGroup, num_slots: int) -> None:
        for seq in group.seqs:
            self.manager.append_slot(seq)  # clean: the block is in the table of the running sequence
            self.manager.append_lookahead(seq, num_slots)  # clean: finish and abort both drop the lookahead table

    def branch(self, group: SequenceGroup, parent: Sequence, child: Sequence) -> bool:
        if not self.manager.fork(parent, child):  # clean: near miss, the child joins the group whose sequences are all freed
            return False
        child.status = SeqStatus.RUNNING
        group.seqs.append(child)
        return True

    def preempt(self, group: SequenceGroup) -> None:
        self.running.remove(group)
        for seq in group.seqs:
            self.manager.drop_lookahead(seq)
            self.manager.swap_out(seq)  # leak: a swapped group that is aborted never gets its host blocks freed
            seq.status = SeqStatus.SWAPPED
        self.swapped.append(group)

    def resume(self) -> None:
        while self.swapped:
            group = self.swapped[0]
            for seq in group.seqs:
                if seq.status is SeqStatus.RUNNING:
                    continue
                if self.manager.swap_in(seq) is None:  # clean: near miss, on None nothing is held, else block_tables owns it
                    return
                seq.status = SeqStatus.RUNNING
            self.running.append(self.swapped.popleft())

    def finish(self, group: SequenceGroup) -> None:
        self.running.remove(group)
        for seq in group.seqs:
            self.manager.drop_lookahead(seq)
            self.manager.free_seq(seq)
            seq.status = SeqStatus.FINISHED

    def abort(self, request_id: str) -> None:
        for queue in (self.waiting, self.running, self.swapped):
            for group in list(queue):
                if group.request_id != request_id:
                    continue
                queue.remove(group)
                for seq in group.seqs:
                    self.manager.drop_lookahead(seq)
                    self.manager.free_seq(seq)
                    seq.status = SeqStatus.FINISHED
