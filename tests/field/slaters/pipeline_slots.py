"""1F1B pipeline schedule: micro-batch slots and receive buffers per stage."""
from __future__ import annotations

import logging
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Deque, Dict, List, Optional, Tuple

log = logging.getLogger("pipe.sched")


class SlotTable:
    """Receive slots of one stage; a slot stays taken from recv to the end of the backward."""

    def __init__(self, n: int) -> None:
        self._busy = [False] * n
        self.data: List[Any] = [None] * n

    def take(self) -> Optional[int]:
        for i, b in enumerate(self._busy):
            if not b:
                self._busy[i] = True
                return i
        return None

    def take_at(self, preferred: int) -> Optional[int]:
        """The preferred slot, or whichever is free."""
        if not self._busy[preferred]:
            self._busy[preferred] = True
            return preferred
        return self.take()  # clean: returned to the caller

    def take_pair(self) -> Optional[Tuple[int, int]]:
        a = self.take()  # leak: the pair fails on the second slot and the first stays busy
        b = self.take()  # clean: near miss, None here when the first is None as well, else in the pair
        if a is None or b is None:
            return None
        return a, b

    def vacate(self, i: int) -> None:
        self._busy[i] = False
        self.data[i] = None

    def busy(self) -> int:
        return sum(self._busy)


@dataclass
class MicroBatch:
    index: int
    tokens: List[int]
    slot: Optional[int] = None
    chunks: List[int] = field(default_factory=list)


class StageRuntime:
    def __init__(self, rank: int, slots: SlotTable) -> None:
        self.rank = rank
        self.slots = slots
        self.inflight: Dict[int, MicroBatch] = {}
        self.warmup: Deque[MicroBatch] = deque()

    def forward(self, mb: MicroBatch) -> bool:
        if mb.index in self.inflight:
            return True
        mb.slot = self.slots.take()  # clean: near miss, kept with the micro-batch in inflight until backward
        if mb.slot is None:
            return False
        self.slots.data[mb.slot] = mb.tokens
        self.inflight[mb.index] = mb
        return True

    def forward_only(self, mb: MicroBatch) -> Optional[int]:
        slot = self.slots.take()  # leak: padded micro-batches return early
        if slot is None:
            return None
        self.slots.data[slot] = mb.tokens
        if not any(mb.tokens):
            return 0
        total = sum(self.slots.data[slot])
        self.slots.vacate(slot)
        return total

    def backward(self, index: int) -> bool:
        mb = self.inflight.pop(index, None)
        if mb is None or mb.slot is None:
            return False
        self.slots.vacate(mb.slot)
        mb.slot = None
        return True

    def flush(self) -> None:
        for index in list(self.inflight):
            self.backward(index)

    def warm(self, mb: MicroBatch) -> bool:
        slot = self.slots.take_at(mb.index % 2)  # clean: in the warm-up queue, vacated by cooldown
        if slot is None:
            return False
        mb.slot = slot
        self.warmup.append(mb)
        return True

    def cooldown(self) -> int:
        n = 0
        while self.warmup:
            mb = self.warmup.popleft()
            self.slots.vacate(mb.slot)
            n += 1
        return n


class InterleavedRuntime:
    """Several model chunks per rank; each chunk of a micro-batch has its own slot."""

    def __init__(self, slots: SlotTable, chunks: int) -> None:
        self.slots = slots
        self.chunks = chunks
        self.table: Dict[int, List[int]] = defaultdict(list)

    def forward_chunk(self, mb: MicroBatch, chunk: int) -> bool:
        slot = self.slots.take()  # clean: moved into the table, retire vacates the whole row
        if slot is None:
            return False
        self.slots.data[slot] = (chunk, mb.tokens)
        self.table[mb.index].append(slot)
        return True

    def retire(self, index: int) -> None:
        for slot in self.table.pop(index, []):
            self.slots.vacate(slot)

    def begin(self, mb: MicroBatch) -> bool:
        for c in range(self.chunks):
            slot = self.slots.take()  # leak: a later chunk without slot returns, earlier ones are in a list nobody walks
            if slot is None:
                mb.chunks = []
                return False
            mb.chunks.append(slot)
        return True

    def end(self, mb: MicroBatch) -> None:
        while mb.chunks:
            self.slots.vacate(mb.chunks.pop())

    def begin_all(self, mbs: List[MicroBatch]) -> int:
        started = 0
        for mb in mbs:
            taken: List[int] = []
            while len(taken) < self.chunks:
                slot = self.slots.take()  # clean: near miss, for-else puts them into the micro-batch, otherwise rolled back
                if slot is None:
                    break
                taken.append(slot)
            else:
                mb.chunks = taken
                started += 1
                continue
            for slot in taken:
                self.slots.vacate(slot)
            break
        return started


class SkipBuffers:
    """Buffers for skip connections that bypass the stages in between."""

    def __init__(self, slots: SlotTable) -> None:
        self.slots = slots
        self._held: Dict[Tuple[int, str], int] = {}

    def stash(self, mb: int, name: str, value: Any) -> bool:
        slot = self.slots.take()  # leak: pop hands out the value and forgets the slot
        if slot is None:
            return False
        self.slots.data[slot] = value
        self._held[(mb, name)] = slot
        return True

    def pop(self, mb: int, name: str) -> Any:
        slot = self._held.pop((mb, name), None)
        if slot is None:
            return None
        return self.slots.data[slot]

    def stash_many(self, mb: int, values: Dict[str, Any]) -> List[int]:
        got: List[int] = []
        for name, v in values.items():
            slot = self.slots.take()  # clean: near miss, returned as far as it got; unstash_many vacates
            if slot is None:
                log.warning("micro-batch %d: %s recomputed", mb, name)
                break
            self.slots.data[slot] = v
            got.append(slot)
        return got

    def unstash_many(self, got: List[int]) -> List[Any]:
        out = [self.slots.data[s] for s in got]
        for s in got:
            self.slots.vacate(s)
        return out


def exchange_halo(slots: SlotTable, left: List[int], right: List[int]) -> Optional[int]:
    pair = slots.take_pair()  # clean: near miss, both vacated through the loop
    if pair is None:
        return None
    for slot, side in zip(pair, (left, right)):
        slots.data[slot] = side
    total = sum(len(slots.data[s]) for s in pair)
    for s in pair:
        slots.vacate(s)
    return total


def run_schedule(stage: StageRuntime, mbs: List[MicroBatch], warmup: int) -> int:
    done = 0
    pending: Deque[int] = deque()
    for i, mb in enumerate(mbs):
        if not stage.forward(mb):  # clean: near miss, the schedule retires each one, flush the rest
            stage.flush()
            break
        pending.append(mb.index)
        if i >= warmup and stage.backward(pending.popleft()):
            done += 1
    while pending:
        done += stage.backward(pending.popleft())
    return done


def recompute(skip: SkipBuffers, mb: int, values: Dict[str, Any], needed: bool) -> List[Any]:
    got = skip.stash_many(mb, values)  # leak: not needed returns without unstash
    if not needed:
        return []
    return skip.unstash_many(got)


def main() -> None:
    slots = SlotTable(8)
    stage = StageRuntime(0, slots)
    mbs = [MicroBatch(i, [i, i + 1]) for i in range(5)]
    print(run_schedule(stage, mbs, 2), stage.forward_only(MicroBatch(9, [1, 2])))
    stage.warm(mbs[0])
    stage.warm(mbs[1])
    print(stage.cooldown())
    inter = InterleavedRuntime(slots, 2)
    for c in range(2):
        inter.forward_chunk(mbs[0], c)
    inter.retire(0)
    print(inter.begin_all(mbs))
    for mb in mbs:
        inter.end(mb)
    skip = SkipBuffers(slots)
    print(recompute(skip, 0, {"x": 1}, True), exchange_halo(slots, [1], [2, 3]), slots.busy())


if __name__ == "__main__":
    main()
