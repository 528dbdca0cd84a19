"""Activation stash of a pipeline stage under the 1F1B schedule.

Slots are bits of one integer; reserve() answers None when the stash is full.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional


@dataclass
class Microbatch:
    index: int
    tokens: List[int]
    slot: Optional[int] = None
    is_last: bool = False


class StashTable:
    """Fixed number of activation slots; a set bit is a slot in use."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._used = 0
        self._rows: List[Optional[List[float]]] = [None] * num_slots

    def reserve(self) -> Optional[int]:
        for i in range(self.num_slots):
            if not self._used >> i & 1:
                self._used |= 1 << i
                return i
        return None

    def reserve_run(self, count: int) -> Optional[List[int]]:
        got: List[int] = []
        while len(got) < count:
            slot = self.reserve()  # clean: near miss, a short run is rolled back before None is returned
            if slot is None:
                for taken in got:
                    self.unreserve(taken)
                return None
            got.append(slot)
        return got

    def unreserve(self, slot: int) -> None:
        if not self._used >> slot & 1:
            raise ValueError(f"slot {slot} is not reserved")
        self._used &= ~(1 << slot)
        self._rows[slot] = None

    def write(self, slot: int, row: List[float]) -> None:
        self._rows[slot] = row

    def read(self, slot: int) -> List[float]:
        row = self._rows[slot]
        assert row is not None
        return row

    def in_use(self) -> int:
        return bin(self._used).count("1")


class PipelineStage:
    def __init__(self, rank: int, stash: StashTable, is_last: bool = False) -> None:
        self.rank = rank
        self.stash = stash
        self.is_last = is_last
        self._pending: Dict[int, int] = {}
        self._recompute = False

    def forward(self, mb: Microbatch) -> Optional[List[float]]:
        slot = self.stash.reserve()  # clean: kept in the pending table until backward
        if slot is None:
            return None
        out = [float(t) for t in mb.tokens]
        self.stash.write(slot, out)
        self._pending[mb.index] = slot
        return out

    def backward(self, mb: Microbatch) -> List[float]:
        slot = self._pending.pop(mb.index)
        grads = [x * 0.5 for x in self.stash.read(slot)]
        self.stash.unreserve(slot)
        return grads

    def forward_into(self, mb: Microbatch) -> bool:
        """Like forward, with the slot on the microbatch itself."""
        mb.slot = self.stash.reserve()  # leak: an empty microbatch returns with its slot and retire() is only called for those that ran
        if mb.slot is None:
            return False
        if not mb.tokens:
            return False
        self.stash.write(mb.slot, [float(t) for t in mb.tokens])
        return True

    def retire(self, mb: Microbatch) -> None:
        if mb.slot is not None:
            self.stash.unreserve(mb.slot)
            mb.slot = None

    def run_request(self, batches: Iterable[Microbatch]) -> int:
        ran = 0
        for mb in batches:
            if self.forward_into(mb):
                ran += 1
                self.retire(mb)
        return ran

    def warmup(self, batches: List[Microbatch], depth: int) -> int:
        """Fill the pipe with up to depth microbatches."""
        filled = 0
        for mb in batches:
            if filled == depth:
                break
            slot = self.stash.reserve()  # leak: slot 0 is falsy, so the first reservation is taken for a failure
            if not slot:
                continue
            self.stash.write(slot, [float(t) for t in mb.tokens])
            self._pending[mb.index] = slot
            filled += 1
        return filled

    def cooldown(self, batches: Iterable[Microbatch]) -> None:
        for mb in batches:
            if mb.index in self._pending:
                self.backward(mb)


class InterleavedStage(PipelineStage):
    """Several model chunks on one rank; each chunk keeps its own table."""

    def __init__(self, rank: int, stash: StashTable, num_chunks: int) -> None:
        super().__init__(rank, stash)
        self._by_chunk: List[Dict[int, int]] = [{} for _ in range(num_chunks)]

    def forward_chunk(self, chunk: int, mb: Microbatch) -> bool:
        slot = self.stash.reserve()  # clean: kept per chunk, backward_chunk pops and unreserves
        if slot is None:
            return False
        self._by_chunk[chunk][mb.index] = slot
        self.stash.write(slot, [float(chunk)])
        return True

    def backward_chunk(self, chunk: int, mb: Microbatch) -> float:
        slot = self._by_chunk[chunk].pop(mb.index)
        value = self.stash.read(slot)[0]
        self.stash.unreserve(slot)
        return value

    def forward_pair(self, a: Microbatch, b: Microbatch) -> bool:
        first = self.stash.reserve()  # leak: kept when the second reservation fails
        if first is None:
            return False
        second = self.stash.reserve()  # clean: None when the pair fails, stored otherwise
        if second is None:
            return False
        self._by_chunk[0][a.index] = first
        self._by_chunk[0][b.index] = second
        return True

    def forward_group(self, group: List[Microbatch]) -> bool:
        slots = self.stash.reserve_run(len(group))  # clean: all are stored per microbatch, backward_chunk unreserves
        if slots is None:
            return False
        for mb, slot in zip(group, slots):
            self._by_chunk[0][mb.index] = slot
            self.stash.write(slot, [1.0])
        return True

    def probe_group(self, group: List[Microbatch], limit: int) -> int:
        """How many of a group can be kept within limit slots."""
        slots = self.stash.reserve_run(len(group))  # leak: only the first limit slots are unreserved
        if slots is None:
            return 0
        kept = slots[:limit]
        for slot in kept:
            self.stash.unreserve(slot)
        return len(kept)


class RecomputeStage(PipelineStage):
    """Stashes only when activations are not recomputed in backward."""

    def forward(self, mb: Microbatch) -> Optional[List[float]]:
        slot: Optional[int] = None
        if not self._recompute:
            slot = self.stash.reserve()  # clean: near miss, the same flag guards the unreserve at the end
            if slot is None:
                return None
        out = [float(t) * 2 for t in mb.tokens]
        if not self._recompute:
            self.stash.write(slot, out)
            self.stash.unreserve(slot)
        return out

    def boundary(self, mb: Microbatch) -> List[float]:
        slot = None
        if not self.is_last:
            slot = self.stash.reserve()  # leak: the last microbatch of an inner stage takes a slot that the second test passes over
        out = [float(t) + 1.0 for t in mb.tokens]
        if slot is not None and not mb.is_last:
            self.stash.unreserve(slot)
        return out
