"""Chunked prefill runner with token-slot reservations and per-step scratch."""
import logging
from dataclasses import dataclass, field
from itertools import islice
from typing import Dict, Generator, Iterable, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)

Slots = List[int]


@dataclass
class Prefill:
    rid: int
    tokens: List[int]
    done: int = 0
    slots: Slots = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


class SlotMap:
    def __init__(self, total: int):
        self.kv = torch.zeros(total, 4)
        self._free = torch.arange(total).tolist()

    def allocate_slots(self, n: int) -> Optional[Slots]:
        if n > len(self._free):
            return None
        cut = len(self._free) - n
        self._free, got = self._free[:cut], self._free[cut:]
        return got

    def free_slots(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)


class PrefillRunner:
    def __init__(self, smap: SlotMap, chunk: int):
        self.smap = smap
        self.chunk = chunk
        self.active: Dict[int, Prefill] = {}
        self.lookahead: Slots = []

    def step(self, pf: Prefill) -> bool:
        n = min(self.chunk, pf.left)
        slots = self.smap.allocate_slots(n)  # clean: moved into the request, retire frees them
        if slots is None:
            return False
        self._write(slots, pf)
        pf.slots.extend(slots)
        pf.done += n
        self.active[pf.rid] = pf
        return True

    def _write(self, slots: Slots, pf: Prefill) -> None:
        for s, t in zip(slots, pf.tokens[pf.done:]):
            self.smap.kv[s] = float(t)

    def retire(self, pf: Prefill) -> None:
        self.active.pop(pf.rid, None)
        self.smap.free_slots(pf.slots)
        pf.slots = []

    def step_replace(self, pf: Prefill) -> bool:
        slots = self.smap.allocate_slots(min(self.chunk, pf.left))  # leak: a full chunk that changes nothing returns False with the slots
        if slots is None:
            return False
        before = self.smap.kv[slots].clone()
        self._write(slots, pf)
        if torch.equal(before, self.smap.kv[slots]):
            return False
        pf.slots += slots
        pf.done += len(slots)
        return True

    def step_pair(self, a: Prefill, b: Prefill) -> bool:
        sa = self.smap.allocate_slots(min(self.chunk, a.left))  # clean: near miss, freed when b gets none
        if sa is None:
            return False
        sb = self.smap.allocate_slots(min(self.chunk, b.left))  # clean: moved into b
        if sb is None:
            self.smap.free_slots(sa)
            return False
        a.slots.extend(sa)
        b.slots.extend(sb)
        return True

    def step_both(self, a: Prefill, b: Prefill) -> bool:
        sa = self.smap.allocate_slots(min(self.chunk, a.left))  # leak: not freed when b gets none
        sb = self.smap.allocate_slots(min(self.chunk, b.left))  # leak: not freed when a got none but b, with a smaller chunk, did
        if sa is None or sb is None:
            return False
        a.slots.extend(sa)
        b.slots.extend(sb)
        return True

    def trial(self, pf: Prefill) -> float:
        slots = self.smap.allocate_slots(pf.left)  # clean: freed in finally
        if slots is None:
            return 0.0
        try:
            self._write(slots, pf)
            return float(self.smap.kv[slots].sum())
        finally:
            self.smap.free_slots(slots)

    def trial_first(self, pf: Prefill, k: int) -> float:
        slots = self.smap.allocate_slots(pf.left)  # leak: islice frees the first k only
        if slots is None:
            return 0.0
        self._write(slots, pf)
        s = float(self.smap.kv[slots].sum())
        self.smap.free_slots(islice(slots, k))
        return s

    def refill(self, n: int) -> None:
        got = self.smap.allocate_slots(n)  # leak: the slots left in lookahead are overwritten, next_slot refills early
        if got is not None:
            self.lookahead = got

    def next_slot(self) -> int:
        if len(self.lookahead) < 2:
            self.refill(8)
        return self.lookahead.pop()  # clean: taken over by the caller

    def fill_one(self, pf: Prefill) -> None:
        pf.slots.append(self.next_slot())  # clean: retire frees the request's slots
        pf.done += 1

    def mark(self, value: float) -> None:
        s = self.next_slot()  # leak: a local slot number that nobody stores
        self.smap.kv[s] = value

    def mark_and_back(self, value: float) -> None:
        s = self.next_slot()  # clean: freed
        self.smap.kv[s] = value
        self.smap.free_slots([s])

    def chunks(self, pf: Prefill) -> Generator[Tuple[int, int], None, None]:
        while pf.left:
            n = min(self.chunk, pf.left)
            slots = self.smap.allocate_slots(n)  # clean: near miss, moved into the request before the yield
            if slots is None:
                return
            pf.slots.extend(slots)
            yield pf.done, n
            pf.done += n

    def abort_all(self) -> int:
        n = 0
        for pf in list(self.active.values()):
            n += len(pf.slots)
            self.retire(pf)
        return n

    def clone(self, src: Prefill, rid: int) -> Optional[Prefill]:
        slots = self.smap.allocate_slots(len(src.slots))  # clean: near miss, becomes the clone's slots
        if slots is None:
            return None
        self.smap.kv[slots] = self.smap.kv[src.slots]
        return Prefill(rid, list(src.tokens), src.done, slots)

    def compare(self, a: Prefill) -> bool:
        b = self.clone(a, -1)  # leak: the clone is compared and forgotten
        if b is None:
            return False
        return bool(torch.equal(self.smap.kv[a.slots], self.smap.kv[b.slots]))

    def verify_clone(self, a: Prefill) -> bool:
        b = self.clone(a, -1)  # clean: retired
        if b is None:
            return False
        same = bool(torch.equal(self.smap.kv[a.slots], self.smap.kv[b.slots]))
        self.retire(b)
        return same
