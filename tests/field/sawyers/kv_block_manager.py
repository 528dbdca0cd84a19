"""Paged KV block manager: copy-on-write forks, host swap, beam expansion."""
from __future__ import annotations

import enum
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Iterable, Optional

logger = logging.getLogger(__name__)


class SeqStatus(enum.Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3
    IGNORED = 4


@dataclass
class Block:
    block_id: int
    device: str
    ref_count: int = 0


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    status: SeqStatus = SeqStatus.WAITING
    score: float = 0.0
    children: list["Sequence"] = field(default_factory=list)

    def num_blocks(self, block_size: int) -> int:
        return (len(self.tokens) + block_size - 1) // block_size


class BlockAllocator:
    def __init__(self, device: str, num_blocks: int) -> None:
        self.device = device
        self._free: deque[Block] = deque(Block(i, device) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[Block]:
        if not self._free:
            return None
        block = self._free.popleft()
        block.ref_count = 1
        return block

    def share(self, block: Block) -> Block:
        block.ref_count += 1
        return block

    def free(self, block: Block) -> None:
        if block.ref_count == 0:
            raise ValueError(f"double free of block {block.block_id}")
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.append(block)

    def allocate_many(self, n: int) -> Optional[list[Block]]:
        out: list[Block] = []
        while len(out) < n:
            block = self.allocate()  # clean: collected in out, freed when the pool runs short
            if block is None:
                for taken in out:
                    self.free(taken)
                return None
            out.append(block)
        return out


class BlockSpaceManager:
    def __init__(self, block_size: int, gpu_blocks: int, cpu_blocks: int) -> None:
        self.block_size = block_size
        self.gpu = BlockAllocator("cuda", gpu_blocks)
        self.cpu = BlockAllocator("cpu", cpu_blocks)
        self.tables: dict[int, list[Block]] = {}

    def allocate(self, seq: Sequence) -> bool:
        blocks = self.gpu.allocate_many(seq.num_blocks(self.block_size))  # clean: stored in the table, free() returns it
        if blocks is None:
            return False
        self.tables[seq.seq_id] = blocks
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        src = self.tables[parent.seq_id]
        self.tables[child.seq_id] = [self.gpu.share(b) for b in src]  # clean: child's table, freed by free(child)

    def append_slot(self, seq: Sequence) -> Optional[tuple[int, int]]:
        """Make the last block writable; returns a (src, dst) copy if one is needed."""
        table = self.tables[seq.seq_id]
        last = table[-1]
        if last.ref_count == 1:
            return None
        fresh = self.gpu.allocate()  # clean: near miss, replaces the last entry whose count is dropped
        if fresh is None:
            raise RuntimeError("append_slot called without headroom")
        table[-1] = fresh
        self.gpu.free(last)
        return last.block_id, fresh.block_id

    def reserve_lookahead(self, seq: Sequence, num_tokens: int) -> bool:
        table = self.tables[seq.seq_id]
        want = (len(seq.tokens) + num_tokens + self.block_size - 1) // self.block_size
        extra: list[Block] = []
        for _ in range(want - len(table)):
            block = self.gpu.allocate()  # leak: blocks already in extra are dropped when the pool runs short
            if block is None:
                logger.debug("no lookahead room for seq %d", seq.seq_id)
                return False
            extra.append(block)
        table.extend(extra)
        return True

    def swap_out(self, seq: Sequence) -> Optional[dict[int, int]]:
        table = self.tables[seq.seq_id]
        mapping: dict[int, int] = {}
        host: list[Block] = []
        for block in table:
            dst = self.cpu.allocate()  # clean: becomes the table, freed on shortage
            if dst is None:
                while host:
                    self.cpu.free(host.pop())
                return None
            host.append(dst)
            mapping[block.block_id] = dst.block_id
        for block in table:
            self.gpu.free(block)
        self.tables[seq.seq_id] = host
        return mapping

    def swap_in(self, seq: Sequence) -> Optional[dict[int, int]]:
        host = self.tables[seq.seq_id]
        fresh = self.gpu.allocate_many(len(host))  # clean: replaces the host table, which is freed
        if fresh is None:
            return None
        mapping = {h.block_id: g.block_id for h, g in zip(host, fresh)}
        for h in host:
            self.cpu.free(h)
        self.tables[seq.seq_id] = fresh
        return mapping

    def free(self, seq: Sequence) -> None:
        for block in self.tables.pop(seq.seq_id, ()):
            (self.gpu if block.device == "cuda" else self.cpu).free(block)


class BeamSearcher:
    def __init__(self, manager: BlockSpaceManager, width: int) -> None:
        self.manager = manager
        self.width = width
        self._next_id = 1 << 20

    def _child_of(self, parent: Sequence, token: int, logprob: float) -> Sequence:
        self._next_id += 1
        return Sequence(self._next_id, parent.tokens + [token], SeqStatus.RUNNING, parent.score + logprob)

    def expand(self, beams: list[Sequence], cands: dict[int, list[tuple[int, float]]]) -> list[Sequence]:
        seen: set[tuple[int, ...]] = set()
        out: list[Sequence] = []
        for parent in beams:
            for token, logprob in cands[parent.seq_id]:
                child = self._child_of(parent, token, logprob)
                self.manager.fork(parent, child)  # leak: a duplicate child is skipped with its table still counted
                key = tuple(child.tokens)
                if key in seen:
                    continue
                seen.add(key)
                out.append(child)
        out.sort(key=lambda s: s.score, reverse=True)
        for loser in out[self.width:]:
            self.manager.free(loser)
        for parent in beams:
            self.manager.free(parent)
        return out[: self.width]

    def split(self, seq: Sequence, n: int) -> list[Sequence]:
        for i in range(n):
            child = self._child_of(seq, i, 0.0)
            if self.manager.gpu.num_free < 1:
                break
            self.manager.fork(seq, child)  # clean: near miss, the break comes before the fork
            seq.children.append(child)
        return seq.children

    def collapse(self, seq: Sequence) -> None:
        while seq.children:
            self.manager.free(seq.children.pop())


class Scheduler:
    def __init__(self, manager: BlockSpaceManager, max_model_len: int) -> None:
        self.manager = manager
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.probes: dict[int, Sequence] = {}

    def schedule(self) -> list[Sequence]:
        while self.waiting:
            seq = self.waiting[0]
            if not self.manager.allocate(seq):  # clean: sequence joins running, finish() frees it
                break
            self.waiting.popleft()
            seq.status = SeqStatus.RUNNING
            self.running.append(seq)
        return list(self.running)

    def admit_prefilled(self, seq: Sequence) -> bool:
        if not self.manager.allocate(seq):  # leak: an over-long sequence is ignored after its blocks were taken
            return False
        if len(seq.tokens) > self.max_model_len:
            seq.status = SeqStatus.IGNORED
            return False
        seq.status = SeqStatus.RUNNING
        self.running.append(seq)
        return True

    def start_probe(self, seq: Sequence) -> bool:
        if seq.seq_id in self.probes:
            return True
        if not self.manager.allocate(seq):  # clean: near miss, kept in probes and freed in end_probes
            return False
        self.probes[seq.seq_id] = seq
        return True

    def end_probes(self) -> None:
        for seq in self.probes.values():
            self.manager.free(seq)
        self.probes.clear()

    def finish(self, seq_ids: Iterable[int]) -> None:
        done = set(seq_ids)
        for seq in self.running:
            if seq.seq_id in done:
                seq.status = SeqStatus.FINISHED
                self.manager.free(seq)
        self.running = [s for s in self.running if s.seq_id not in done]
