"""Continuous batching: requests are moved into numbered decode slots."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Deque, Dict, Iterable, List, Optional, Set

from slotboard import NoSlot, SlotBoard

log = logging.getLogger(__name__)


@dataclass
class Request:
    request_id: str
    prompt: List[int]
    priority: int = 0
    slot: Optional[int] = None
    mirror: Optional[int] = None
    output: List[int] = field(default_factory=list)
    aborted: bool = False


class Batcher:
    def __init__(self, board: SlotBoard, eos: int) -> None:
        self._board = board
        self._eos = eos
        self._waiting: Deque[Request] = deque()
        self._active: List[Optional[Request]] = [None] * board.size
        self._parked: Dict[str, Request] = {}
        self._reserved: Set[int] = set()

    def enqueue(self, request: Request) -> None:
        self._waiting.append(request)

    def fill(self) -> int:
        """Move waiting requests into slots until there are none left."""
        started = 0
        while self._waiting:
            try:
                slot = self._board.claim_slot()  # leak: a request that was aborted while waiting is skipped and its slot forgotten
            except NoSlot:
                break
            request = self._waiting.popleft()
            if request.aborted:
                continue
            request.slot = slot
            self._active[slot] = request
            started += 1
        return started

    def fill_urgent(self) -> Optional[Request]:
        if not self._waiting:
            return None
        slot = self._claim_or_none()  # clean: near miss, zero is a slot and None is not, the slot goes into the request or back
        if slot is None:
            return None
        request = max(self._waiting, key=lambda one: one.priority)
        self._waiting.remove(request)
        if request.aborted:
            self._board.vacate_slot(slot)
            return None
        request.slot = slot
        self._active[request.slot] = request
        return request

    def _claim_or_none(self) -> Optional[int]:
        if self._board.free == 0:
            return None
        return self._board.claim_slot()  # clean: returned to the caller

    def mirror(self, request: Request) -> bool:
        mirror = self._claim_or_none()  # leak: slot zero is taken for none and dropped
        if not mirror:
            return False
        self._board.copy(request.slot, mirror)
        self._board.vacate_slot(mirror)
        return True

    def reserve(self, count: int) -> bool:
        """Set slots aside for a beam; unreserve() gives them back."""
        claimed: List[int] = []
        while len(claimed) < count:
            slot = self._claim_or_none()  # clean: near miss, a partial reservation is rolled back, a full one is kept in the set
            if slot is None:
                self._board.vacate_slots(slots=claimed)
                return False
            claimed.append(slot)
        self._reserved.update(claimed)
        return True

    def unreserve(self) -> None:
        while self._reserved:
            self._board.vacate_slot(self._reserved.pop())

    def step(self, tokens: Dict[int, int]) -> List[Request]:
        finished = []
        for slot, token in tokens.items():
            request = self._active[slot]
            if request is None:
                continue
            request.output.append(token)
            if token == self._eos or request.aborted:
                self._active[slot] = None
                self._board.vacate_slot(request.slot)
                request.slot = None
                finished.append(request)
        return finished

    def park(self, request: Request) -> None:
        if request.request_id in self._parked:
            return
        request.mirror = self._board.claim_slot()  # leak: unpark takes the request out of the table and forgets the mirror slot
        self._board.copy(request.slot, request.mirror)
        self._parked[request.request_id] = request

    def unpark(self, request_id: str) -> Optional[Request]:
        request = self._parked.pop(request_id, None)
        if request is None:
            return None
        self._board.copy(request.mirror, request.slot)
        request.mirror = None
        return request

    def close(self) -> None:
        for request in self._active:
            if request is not None:
                self._board.vacate_slot(request.slot)
        self._active = [None] * self._board.size
        self.unreserve()
        for request in self._parked.values():
            self._board.vacate_slot(request.mirror)
        self._parked.clear()


def calibrate(board: SlotBoard, lengths: Iterable[int]) -> Dict[int, float]:
    timings: Dict[int, float] = {}
    for length in lengths:
        slot = board.claim_slot()  # clean: vacated at the end of every round
        row = slot + 0
        timings[length] = board.time_prefill(row, length)
        board.vacate_slot(row)
    return timings


def swap(board: SlotBoard, request: Request) -> None:
    fresh = board.claim_slot()  # clean: near miss, the exchange puts it into the request and the old one is vacated
    board.copy(request.slot, fresh)
    request.slot, fresh = fresh, request.slot
    board.vacate_slot(fresh)


def relocate(board: SlotBoard, request: Request, tries: int) -> bool:
    for _ in range(tries):
        candidate = board.claim_slot()  # leak: a candidate that is not adjacent is given up for the next one
        if abs(candidate - request.slot) == 1:
            board.assign_slot(owner=request.request_id, slot=candidate)
            return True
    return False


def compact(board: SlotBoard, requests: List[Request]) -> None:
    for request in requests:
        lowest = board.claim_slot()  # clean: near miss, either it moves into the request or goes back
        if lowest < request.slot:
            board.copy(request.slot, lowest)
            lowest, request.slot = request.slot, lowest
        board.vacate_slot(lowest)
