"""Continuous batching scheduler with token credits and decode slots."""
from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional


class TokenBudget:
    """Counts the tokens that may be in flight."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._available = capacity

    def reserve(self, tokens: int) -> bool:
        if tokens > self._available:
            return False
        self._available -= tokens  # clean: held for the caller until refund
        return True

    def reserve_up_to(self, tokens: int) -> int:
        granted = min(tokens, self._available)
        self._available -= granted  # clean: the granted count is returned
        return granted

    def refund(self, tokens: int) -> None:
        self._available = min(self.capacity, self._available + tokens)


class SlotTable:
    """Decode slots; the lowest index is handed out first."""

    def __init__(self, slots: int) -> None:
        self._heap = list(range(slots))

    def claim(self) -> Optional[int]:
        if not self._heap:
            return None
        return heapq.heappop(self._heap)  # clean: returned to the caller

    def vacate(self, slot: int) -> None:
        heapq.heappush(self._heap, slot)


@dataclass
class Request:
    request_id: str
    prompt_len: int
    max_new_tokens: int
    priority: int = 0
    slot: Optional[int] = None
    credits: int = 0
    output: List[int] = field(default_factory=list)
    cancelled: bool = False

    @property
    def footprint(self) -> int:
        return self.prompt_len + self.max_new_tokens


class Scheduler:
    def __init__(self, budget: TokenBudget, slots: SlotTable) -> None:
        self.budget = budget
        self.slots = slots
        self.waiting: Deque[Request] = deque()
        self.running: Dict[str, Request] = {}

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def _try_start(self, request: Request) -> bool:
        if not self.budget.reserve(request.footprint):  # clean: near miss, refunded when no slot is free, else kept on the request
            return False
        slot = self.slots.claim()  # clean: moved to the request, _finish vacates it
        if slot is None:
            self.budget.refund(request.footprint)
            return False
        request.slot = slot
        request.credits = request.footprint
        self.running[request.request_id] = request
        return True

    def schedule(self) -> List[Request]:
        started: List[Request] = []
        while self.waiting:
            request = self.waiting[0]
            if not request.cancelled and not self._try_start(request):
                break
            self.waiting.popleft()
            if not request.cancelled:
                started.append(request)
        return started

    def schedule_chunked(self, chunk: int) -> List[Request]:
        """Start prompts with a partial prefill credit."""
        started: List[Request] = []
        for request in list(self.waiting):
            slot = self.slots.claim()  # clean: near miss, vacated on a zero grant, else on the request
            if slot is None:
                break
            granted = self.budget.reserve_up_to(min(chunk, request.prompt_len))  # leak: an under-half grant is skipped without a refund
            if granted == 0:
                self.slots.vacate(slot)
                break
            if granted * 2 < min(chunk, request.prompt_len):
                self.slots.vacate(slot)
                continue
            request.slot, request.credits = slot, granted
            self.waiting.remove(request)
            self.running[request.request_id] = request
            started.append(request)
        return started

    def _finish(self, request: Request) -> None:
        self.running.pop(request.request_id, None)
        if request.slot is not None:
            self.slots.vacate(request.slot)
            request.slot = None
        self.budget.refund(request.credits)
        request.credits = 0

    def step(self, tokens: Dict[str, int], eos: int) -> List[Request]:
        done: List[Request] = []
        for request in list(self.running.values()):
            token = tokens.get(request.request_id, eos)
            request.output.append(token)
            if token == eos or request.cancelled or len(request.output) >= request.max_new_tokens:
                self._finish(request)
                done.append(request)
        return done

    def migrate_slot(self, request: Request) -> bool:
        """Compact the batch by moving a request to a lower slot."""
        if request.slot is None:
            return False
        target = self.slots.claim()  # leak: the lower slot replaces the old one, which is not vacated
        if target is None:
            return False
        if target > request.slot:
            self.slots.vacate(target)
            return False
        request.slot = target
        return True

    def extend(self, request: Request, extra: int) -> bool:
        """Raise the generation limit of a running request."""
        ok = self.budget.reserve(extra)  # clean: near miss, added to the request's credits
        if ok:
            request.max_new_tokens += extra
            request.credits += extra
        return ok


class BeamExpander:
    """Fans a request out into beams that each need a slot."""

    def __init__(self, slots: SlotTable, max_width: int = 8) -> None:
        self.slots = slots
        self.max_width = max_width

    def expand(self, width: int) -> List[int]:
        beams: List[int] = []
        while len(beams) < width:
            beam = self.slots.claim()  # leak: a short fan-out returns empty and forgets the beams it has
            if beam is None:
                return []
            beams.append(beam)
        return beams

    def widen(self, beams: List[int], extra: int) -> List[int]:
        grown = self.expand(extra)  # leak: beams beyond the maximum width are cut off by the slice
        return (beams + grown)[: self.max_width]

    def collapse(self, beams: List[int], keep: int) -> int:
        for beam in beams:
            if beam != keep:
                self.slots.vacate(beam)
        return keep

    def score(self, width: int) -> int:
        beams = self.expand(width)  # clean: near miss, all but the winner collapse and the winner is vacated
        if not beams:
            return 0
        winner = self.collapse(beams, beams[0])
        self.slots.vacate(winner)
        return winner
