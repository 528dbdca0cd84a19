"""Continuous batching scheduler with request slots and encoder cache entries."""
from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class SlotTable:
    def __init__(self, n: int) -> None:
        self._free: List[int] = list(range(n))[::-1]

    def claim(self) -> int:
        return self._free.pop() if self._free else -1

    def vacate(self, slot: int) -> None:
        self._free.append(slot)


class EncoderCache:
    def __init__(self, budget: int) -> None:
        self.left = budget
        self._size: Dict[str, int] = {}
        self._refs: Dict[str, int] = {}

    def retain(self, key: str, size: int) -> bool:
        if key not in self._size:
            if size > self.left:
                return False
            self.left -= size
            self._size[key] = size
            self._refs[key] = 0
        self._refs[key] += 1
        return True

    def discard(self, key: str) -> None:
        self._refs[key] -= 1
        if self._refs[key] == 0:
            self.left += self._size.pop(key)
            del self._refs[key]


@dataclass
class Request:
    rid: str
    prompt_len: int
    images: Dict[str, int] = field(default_factory=dict)
    slot: int = -1
    grammar_slot: int = -1
    retained: List[str] = field(default_factory=list)
    status: Status = Status.WAITING
    generated: int = 0
    max_tokens: int = 128


class Scheduler:
    def __init__(self, slots: SlotTable, grammar: SlotTable, encoder: EncoderCache, budget: int) -> None:
        self.slots = slots
        self.grammar = grammar
        self.encoder = encoder
        self.budget = budget
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []
        self.draft_slots: Dict[str, int] = {}

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def _retain_images(self, req: Request) -> bool:
        for key, size in req.images.items():
            if not self.encoder.retain(key, size):  # clean: near miss, those before are in req.retained and dropped here on failure
                self._drop_images(req)
                return False
            req.retained.append(key)
        return True

    def _drop_images(self, req: Request) -> None:
        for key in req.retained:
            self.encoder.discard(key)
        req.retained.clear()

    def schedule(self) -> List[Request]:
        admitted: List[Request] = []
        budget = self.budget - len(self.running)
        while self.waiting:
            req = self.waiting[0]
            if req.prompt_len > budget:
                break
            slot = self.slots.claim()  # clean: near miss, vacated when images don't fit, else stored in the request
            if slot < 0:
                break
            if not self._retain_images(req):  # clean: near miss, a failed one has rolled back itself, finish and preempt drop the rest
                self.slots.vacate(slot)
                break
            req.slot = slot
            budget -= req.prompt_len
            self.waiting.popleft()
            req.status = Status.RUNNING
            self.running.append(req)
            admitted.append(req)
        return admitted

    def schedule_priority(self, req: Request) -> bool:
        slot = self.slots.claim()  # leak: the budget check comes after and returns with the slot
        if slot < 0:
            return False
        if req.prompt_len > self.budget - len(self.running):
            self.waiting.appendleft(req)
            return False
        req.slot = slot
        req.status = Status.RUNNING
        self.running.append(req)
        return True

    def attach_grammar(self, req: Request) -> bool:
        if req.grammar_slot >= 0:
            return True
        req.grammar_slot = self.grammar.claim()  # leak: preempt() resets the field without vacating it
        return req.grammar_slot >= 0

    def attach_draft(self, req: Request) -> bool:
        slot = self.slots.claim()  # leak: abort() never looks into draft_slots
        if slot < 0:
            return False
        stale = self.draft_slots.pop(req.rid, None)
        if stale is not None:
            self.slots.vacate(stale)
        self.draft_slots[req.rid] = slot
        return True

    def warm_images(self, images: Dict[str, int]) -> int:
        warm = 0
        for key, size in images.items():
            if self.encoder.retain(key, size):  # leak: counted only, nobody discards the warmed entries
                warm += 1
        return warm

    def fits(self, images: Dict[str, int]) -> bool:
        held: List[str] = []
        for key, size in images.items():
            if not self.encoder.retain(key, size):  # clean: near miss, a trial whose holdings are discarded after the loop
                break
            held.append(key)
        for key in held:
            self.encoder.discard(key)
        return len(held) == len(images)

    def preempt(self) -> Optional[Request]:
        if not self.running:
            return None
        req = self.running.pop()
        self.slots.vacate(req.slot)
        req.slot = -1
        req.grammar_slot = -1
        self._drop_images(req)
        draft = self.draft_slots.pop(req.rid, None)
        if draft is not None:
            self.slots.vacate(draft)
        req.status = Status.PREEMPTED
        self.waiting.appendleft(req)
        return req

    def _finish(self, req: Request) -> None:
        self.slots.vacate(req.slot)
        req.slot = -1
        if req.grammar_slot >= 0:
            self.grammar.vacate(req.grammar_slot)
            req.grammar_slot = -1
        draft = self.draft_slots.pop(req.rid, None)
        if draft is not None:
            self.slots.vacate(draft)
        self._drop_images(req)
        req.status = Status.FINISHED

    def step(self) -> int:
        still: List[Request] = []
        for req in self.running:
            req.generated += 1
            if req.generated >= req.max_tokens:
                self._finish(req)
                continue
            still.append(req)
        done = len(self.running) - len(still)
        self.running = still
        return done

    def abort(self, rid: str) -> bool:
        for req in self.running:
            if req.rid == rid:
                self.running.remove(req)
                self.slots.vacate(req.slot)
                if req.grammar_slot >= 0:
                    self.grammar.vacate(req.grammar_slot)
                self._drop_images(req)
                req.status = Status.FINISHED
                return True
        return False

    def defrag(self, req: Request) -> bool:
        target = self.slots.claim()  # clean: near miss, a higher one is vacated again, a lower one takes the old one's place
        if target < 0:
            return False
        if target > req.slot:
            self.slots.vacate(target)
            return False
        self.slots.vacate(req.slot)
        req.slot = target
        return True

    def reserve_padding(self, n: int) -> bool:
        pads = [self.slots.claim() for _ in range(n)]  # leak: when one is -1 the good ones are not vacated
        if -1 in pads:
            return False
        for slot in pads:
            self.slots.vacate(slot)
        return True

    def probe_free(self) -> bool:
        slot = self.slots.claim()  # clean: vacated at once when it was had
        if slot >= 0:
            self.slots.vacate(slot)
        return slot >= 0
