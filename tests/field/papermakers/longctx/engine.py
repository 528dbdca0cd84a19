from __future__ import annotations

import logging
from dataclasses import dataclass, field

from .ringpass import RingPasser
from .slots import GuardedSlots, SegmentHeap

log = logging.getLogger(__name__)


@dataclass
class LongRequest:
    rid: str
    tokens: int
    batch: bool = False
    slot: int | None = None
    segs: list[int] = field(default_factory=list)
    draft_slot: int | None = None
    speculate: bool = False


class ContextEngine:
    def __init__(self, slots: GuardedSlots, draft_slots: GuardedSlots, segs: SegmentHeap,
                 ring: RingPasser, model, seg_tokens: int = 8192):
        self.slots = slots
        self.draft_slots = draft_slots
        self.segs = segs
        self.ring = ring
        self.model = model
        self.seg_tokens = seg_tokens
        self.running: dict[str, LongRequest] = {}

    def _need(self, req: LongRequest) -> int:
        return -(-req.tokens // self.seg_tokens)

    def enter(self, req: LongRequest) -> bool:
        if len(self.segs) < self._need(req):
            return False
        slot = self.slots.pull_batch() if req.batch else self.slots.pull()  # clean: near miss, stored on the request after the rollback
        if slot is None:
            return False
        if req.speculate:
            req.draft_slot = self.draft_slots.pull()  # clean: near miss, leave pushes it back under the same flag
            if req.draft_slot is None:
                self.slots.push_back(slot)
                return False
        req.slot = slot
        for _ in range(self._need(req)):
            req.segs.append(self.segs.lowest())  # clean: the request's list is restored by leave
        self.running[req.rid] = req
        return True

    def leave(self, rid: str) -> None:
        req = self.running.pop(rid)  # clean: everything it holds is given back below
        if req.speculate:
            self.draft_slots.push_back(req.draft_slot)
            req.draft_slot = None
        self.slots.push_back(req.slot)
        while req.segs:
            self.segs.restore(req.segs.pop())

    def enter_sharded(self, req: LongRequest, shards: int) -> bool:
        """One slot per shard, all or nothing."""
        taken: list[int] = []
        for _ in range(shards):
            slot = self.slots.pull()  # leak: slots of earlier shards are not pushed back on failure
            if slot is None:
                log.info("%s: %d of %d shards", req.rid, len(taken), shards)
                return False
            taken.append(slot)
        self.model.bind_shards(req.rid, taken)
        self.model.on_unbind(req.rid, lambda: [self.slots.push_back(s) for s in taken])
        return True

    def shrink(self, req: LongRequest, keep: int) -> None:
        while len(req.segs) > keep:
            seg = req.segs.pop()  # leak: pinned segments are skipped after they were taken off the request
            if self.model.is_pinned(seg):
                continue
            self.segs.restore(seg)

    def warm(self, n: int) -> None:
        probe = self.segs.lowest()  # leak: a model without graphs returns with the segment
        if not self.model.has_graphs:
            return
        for _ in range(n):
            self.ring.rotate(probe, 1, self.model.attend)
        self.segs.restore(probe)
