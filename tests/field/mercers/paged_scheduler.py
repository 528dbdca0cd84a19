"""Continuous batching scheduler over a paged KV cache with host swap space."""
from __future__ import annotations

import enum
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple

log = logging.getLogger(__name__)


class BlockPool:
    """Reference counted fixed size pages."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._free: Deque[int] = deque(range(num_blocks))
        self._refs: List[int] = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        bid = self._free.popleft()
        self._refs[bid] = 1
        return bid

    def allocate_many(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        out = []
        for _ in range(n):
            bid = self._free.popleft()
            self._refs[bid] = 1
            out.append(bid)
        return out

    def share(self, bid: int) -> int:
        """Take one more reference on a live block."""
        self._refs[bid] += 1
        return bid

    def is_shared(self, bid: int) -> bool:
        return self._refs[bid] > 1

    def free(self, bid: int) -> None:
        self._refs[bid] -= 1
        if self._refs[bid] == 0:
            self._free.append(bid)

    def free_many(self, bids: List[int]) -> None:
        for bid in bids:
            self.free(bid)


class State(enum.Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    max_tokens: int
    blocks: List[int] = field(default_factory=list)
    host_blocks: List[int] = field(default_factory=list)
    scratch: Optional[int] = None
    state: State = State.WAITING
    arrival: float = field(default_factory=time.monotonic)


class Scheduler:
    def __init__(self, gpu: BlockPool, cpu: BlockPool, max_running: int = 64) -> None:
        self.gpu = gpu
        self.cpu = cpu
        self.max_running = max_running
        self.waiting: Deque[Sequence] = deque()
        self.running: Dict[int, Sequence] = {}
        self.swapped: Dict[int, Sequence] = {}
        self.preemptions = 0

    def submit(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def _need(self, n_tokens: int) -> int:
        return -(-n_tokens // self.gpu.block_size)

    # ---- admission -------------------------------------------------------

    def admit(self) -> List[Sequence]:
        admitted: List[Sequence] = []
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting[0]
            need = self._need(len(seq.tokens))
            blocks = self.gpu.allocate_many(need)  # clean: in seq.blocks, freed by finish, preempt, swap_out
            if blocks is None:
                break
            scratch = self.gpu.allocate()  # leak: preempt requeues the seq, the next admit overwrites scratch
            if scratch is None:
                self.gpu.free_many(blocks)
                break
            self.waiting.popleft()
            seq.blocks = blocks
            seq.scratch = scratch
            self._activate(seq)
            admitted.append(seq)
        return admitted

    def admit_chunk(self, seq: Sequence, chunk: int) -> bool:
        """Admit the first chunk of a long prompt; a partial page needs a block of its own."""
        bs = self.gpu.block_size
        full = self.gpu.allocate_many(chunk // bs)  # leak: not rolled back when the tail block is missing
        if full is None:
            return False
        if chunk % bs:
            tail = self.gpu.allocate()  # clean: joins full, which becomes part of seq.blocks
            if tail is None:
                log.debug("no tail block for %d", seq.seq_id)
                self.waiting.appendleft(seq)
                return False
            full.append(tail)
        seq.blocks.extend(full)
        self._activate(seq)
        return True

    def _activate(self, seq: Sequence) -> None:
        seq.state = State.RUNNING
        self.running[seq.seq_id] = seq

    # ---- decode ----------------------------------------------------------

    def append_slot(self, seq: Sequence) -> bool:
        if len(seq.tokens) < len(seq.blocks) * self.gpu.block_size:
            return True
        bid = self.gpu.allocate()  # clean: near miss, None on the early return, otherwise in seq.blocks
        if bid is None:
            return False
        seq.blocks.append(bid)
        return True

    def copy_on_write(self, seq: Sequence) -> Optional[Tuple[int, int]]:
        last = seq.blocks[-1]
        if not self.gpu.is_shared(last):
            return None
        fresh = self.gpu.allocate()  # clean: takes the place of last, whose reference is dropped
        if fresh is None:
            self.preempt(seq)
            return None
        seq.blocks[-1] = fresh
        self.gpu.free(last)
        return last, fresh

    def fork(self, parent: Sequence, child_id: int) -> Optional[Sequence]:
        child = Sequence(child_id, list(parent.tokens), parent.max_tokens)
        for bid in parent.blocks:
            child.blocks.append(self.gpu.share(bid))  # leak: the child is dropped when the batch is full
        if len(self.running) >= self.max_running:
            log.info("batch full, %d not forked", parent.seq_id)
            return None
        self._activate(child)
        return child

    def fork_beams(self, parent: Sequence, ids: List[int]) -> List[Sequence]:
        room = self.max_running - len(self.running)
        beams = []
        for child_id in ids[:room]:
            child = Sequence(child_id, list(parent.tokens), parent.max_tokens)
            child.blocks = [self.gpu.share(b) for b in parent.blocks]  # clean: child goes to running at once
            self._activate(child)
            beams.append(child)
        return beams

    def plan_lookahead(self, k: int) -> Dict[int, List[int]]:
        """Blocks for one multi-step decode; the engine hands the plan to end_lookahead."""
        plan: Dict[int, List[int]] = {}
        for seq in list(self.running.values()):
            extra = self.gpu.allocate_many(self._need(k))  # leak: continue for ending sequences drops it
            if extra is None:
                break
            if len(seq.tokens) + k > seq.max_tokens:
                continue
            plan[seq.seq_id] = extra
        return plan

    def end_lookahead(self, plan: Dict[int, List[int]]) -> None:
        for seq_id, extra in plan.items():
            log.debug("lookahead of %d over", seq_id)
            self.gpu.free_many(extra)
        plan.clear()

    # ---- preemption and swapping -----------------------------------------

    def preempt(self, seq: Sequence) -> None:
        """Recompute style preemption: drop the KV, start over later."""
        self.running.pop(seq.seq_id, None)
        self.gpu.free_many(seq.blocks)
        seq.blocks = []
        seq.state = State.WAITING
        self.preemptions += 1
        self.waiting.appendleft(seq)

    def swap_out(self, seq: Sequence) -> bool:
        host = self.cpu.allocate_many(len(seq.blocks))  # leak: abort of a swapped sequence never frees these
        if host is None:
            return False
        self._copy(seq.blocks, host)
        seq.host_blocks = host
        self.gpu.free_many(seq.blocks)
        seq.blocks = []
        if seq.scratch is not None:
            self.gpu.free(seq.scratch)
            seq.scratch = None
        del self.running[seq.seq_id]
        seq.state = State.SWAPPED
        self.swapped[seq.seq_id] = seq
        return True

    def swap_in(self, seq: Sequence) -> bool:
        dev = self.gpu.allocate_many(len(seq.host_blocks))  # clean: becomes seq.blocks, freed by finish
        if dev is None:
            return False
        self._copy(seq.host_blocks, dev)
        self.cpu.free_many(seq.host_blocks)
        seq.host_blocks = []
        seq.blocks = dev
        del self.swapped[seq.seq_id]
        self._activate(seq)
        return True

    def _copy(self, src: List[int], dst: List[int]) -> None:
        log.debug("copy %d blocks", min(len(src), len(dst)))

    def finish(self, seq: Sequence) -> None:
        self.running.pop(seq.seq_id, None)
        self.gpu.free_many(seq.blocks)
        seq.blocks = []
        if seq.scratch is not None:
            self.gpu.free(seq.scratch)
            seq.scratch = None
        seq.state = State.FINISHED

    def abort(self, seq_id: int) -> bool:
        seq = self.running.get(seq_id)
        if seq is not None:
            self.finish(seq)
            return True
        seq = self.swapped.pop(seq_id, None)
        if seq is not None:
            seq.state = State.FINISHED
            return True
        return False
