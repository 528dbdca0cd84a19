"""Speculative decoding: draft slots, proposal and verification."""
from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple

log = logging.getLogger(__name__)


class DraftTimeout(RuntimeError):
    pass


class SlotPool:
    """Rows of the draft model's static batch."""

    def __init__(self, size: int, name: str = "draft") -> None:
        self.name = name
        self._free = list(range(size - 1, -1, -1))
        self._taken = [False] * size

    def take_slot(self) -> Optional[int]:
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken[slot] = True
        return slot

    def return_slot(self, slot: int) -> None:
        if not self._taken[slot]:
            raise ValueError(f"{self.name} slot {slot} returned twice")
        self._taken[slot] = False
        self._free.append(slot)

    def __len__(self) -> int:
        return len(self._free)


@dataclass
class SpecRequest:
    rid: int
    tokens: List[int] = field(default_factory=list)
    finished: bool = False
    k: int = 4


@dataclass
class Draft:
    req: SpecRequest
    slot: int
    tokens: List[int]


class DraftModel:
    def run(self, slot: int, tokens: Sequence[int], k: int) -> List[int]:
        if len(tokens) > 4096:
            raise DraftTimeout(slot)
        rng = random.Random(slot + len(tokens))
        return [rng.randrange(32000) for _ in range(k)]


class Proposer:
    def __init__(self, pool: SlotPool, model: DraftModel) -> None:
        self.pool = pool
        self.model = model

    def propose(self, batch: Sequence[SpecRequest]) -> List[Draft]:
        drafts: List[Draft] = []
        for req in batch:
            slot = self.pool.take_slot()  # leak: finished requests continue with the slot taken
            if slot is None:
                break
            if req.finished or req.k == 0:
                continue
            drafts.append(Draft(req, slot, self.model.run(slot, req.tokens, req.k)))
        return drafts

    def propose_static(self, batch: Sequence[SpecRequest]) -> List[Draft]:
        drafts: List[Draft] = []
        for req in batch:
            if req.finished:
                continue
            slot = self.pool.take_slot()  # clean: moved into the draft, verify() returns it
            if slot is None:
                break
            drafts.append(Draft(req, slot, self.model.run(slot, req.tokens, req.k)))
        return drafts

    def propose_retry(self, req: SpecRequest) -> Optional[Draft]:
        for attempt in range(3):
            slot = self.pool.take_slot()  # leak: a timed-out attempt tries again with another slot
            if slot is None:
                return None
            try:
                tokens = self.model.run(slot, req.tokens, max(1, req.k - attempt))
            except DraftTimeout:
                log.info("request %d: draft attempt %d timed out", req.rid, attempt)
                continue
            return Draft(req, slot, tokens)
        return None

    def score_prefixes(self, batch: Sequence[SpecRequest]) -> Dict[int, int]:
        scores: Dict[int, int] = {}
        for req in batch:
            slot = self.pool.take_slot()  # clean: near miss, continue leaves through finally
            if slot is None:
                return scores
            try:
                if not req.tokens:
                    continue
                scores[req.rid] = sum(self.model.run(slot, req.tokens, 1))
            except DraftTimeout:
                continue
            finally:
                self.pool.return_slot(slot)
        return scores

    def verify(self, drafts: Sequence[Draft], accept: Sequence[int]) -> int:
        total = 0
        for draft, n in zip(drafts, accept):
            if n > 0:
                draft.req.tokens.extend(draft.tokens[:n])
                total += n
            self.pool.return_slot(draft.slot)
        return total


class MedusaRunner:
    """Keeps a slot per request for the request's whole life."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self._slots: Dict[int, int] = {}

    def start(self, req: SpecRequest) -> bool:
        slot = self.pool.take_slot()  # leak: abort() pops the slot from the table and drops it
        if slot is None:
            return False
        self._slots[req.rid] = slot
        return True

    def finish(self, rid: int) -> None:
        self.pool.return_slot(self._slots.pop(rid))

    def abort(self, rid: int) -> None:
        slot = self._slots.pop(rid, None)
        if slot is not None:
            log.info("aborted request %d in slot %d", rid, slot)


class EagleRunner:
    def __init__(self, pool: SlotPool, target_pool: SlotPool) -> None:
        self.pool = pool
        self.target_pool = target_pool
        self._slots: Dict[int, Tuple[int, int]] = {}
        self._current: Optional[int] = None

    def start(self, req: SpecRequest) -> bool:
        if req.rid in self._slots:
            return True
        draft = self.pool.take_slot()  # clean: stored with the target slot, or returned when that is missing
        if draft is None:
            return False
        target = self.target_pool.take_slot()  # clean: stored in the table, _release() returns it
        if target is None:
            self.pool.return_slot(draft)
            return False
        self._slots[req.rid] = (draft, target)
        return True

    def _release(self, rid: int) -> None:
        pair = self._slots.pop(rid, None)
        if pair is None:
            return
        draft, target = pair
        self.pool.return_slot(draft)
        self.target_pool.return_slot(target)

    def finish(self, rid: int) -> None:
        self._release(rid)

    def abort(self, rid: int, reason: str) -> None:
        log.info("aborting %d: %s", rid, reason)
        self._release(rid)

    def migrate(self, src: "EagleRunner", rid: int) -> bool:
        if rid in self._slots:
            return False
        target = self.target_pool.take_slot()  # leak: not returned when there is no draft slot
        draft = self.pool.take_slot() if target is not None else None  # clean: stored whenever it was obtained
        if draft is None:
            return False
        self._slots[rid] = (draft, target)
        src._release(rid)
        return True

    def try_better(self, req: SpecRequest, model: DraftModel) -> List[int]:
        slot = self.pool.take_slot()  # leak: a worse draft leaves the slot neither kept nor returned
        if slot is None:
            return []
        tokens = model.run(slot, req.tokens, req.k)
        if len(set(tokens)) > req.k // 2:
            if self._current is not None:
                self.pool.return_slot(self._current)
            self._current = slot
        return tokens

    def close(self) -> None:
        for rid in list(self._slots):
            self._release(rid)
        if self._current is not None:
            self.pool.return_slot(self._current)
            self._current = None


def warmup(pool: SlotPool, model: DraftModel, n: int) -> int:
    slots = [pool.take_slot() for _ in range(n)]  # clean: near miss, None entries skipped and the rest returned
    for slot in slots:
        if slot is not None:
            model.run(slot, [0], 1)
    taken = [s for s in slots if s is not None]
    for slot in taken:
        pool.return_slot(slot)
    return len(taken)


def warmup_halves(pool: SlotPool, model: DraftModel, n: int) -> int:
    slots = [pool.take_slot() for _ in range(n)]  # leak: the odd slot at the end is outside both halves
    half = n // 2
    for a, b in zip(slots[:half], slots[half:]):
        for slot in (a, b):
            if slot is not None:
                model.run(slot, [0], 1)
                pool.return_slot(slot)
    return half * 2


if __name__ == "__main__":
    pl, md = SlotPool(16), DraftModel()
    pr = Proposer(pl, md)
    reqs = [SpecRequest(i, [1, 2, 3]) for i in range(4)]
    ds = pr.propose(reqs)  # clean: verify() returns every draft's slot
    print(pr.verify(ds, [1, 0, 2, 4]), pr.score_prefixes(reqs))
    print(pr.verify(pr.propose_static(reqs), [1] * 4))  # clean: verify() returns every draft's slot
    d = pr.propose_retry(reqs[0])  # clean: handed to verify(), which returns its slot
    if d is not None:
        pr.verify([d], [1])
    mr, er = MedusaRunner(pl), EagleRunner(pl, SlotPool(4, "target"))
    print(mr.start(reqs[0]), er.start(reqs[1]), er.try_better(reqs[1], md)[:1])
    mr.finish(0), er.abort(1, "client"), er.close()
    print(warmup(pl, md, 4), warmup_halves(pl, md, 4), len(pl))
