"""Continuous batching: moves requests between waiting, running and done.

A running request owns one batch slot, a quota of KV tokens, and optionally
an output buffer for log-probabilities.  All three come from small pools
defined below and are attached to the request object.
"""

import heapq
import itertools
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Deque, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

logger = logging.getLogger("engine.scheduler")


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    DONE = auto()


class AdmissionRejected(Exception):
    pass


class SlotHeap:
    """Smallest free batch index first, so that the batch stays dense."""

    def __init__(self, size: int) -> None:
        self._heap = list(range(size))

    def occupy(self) -> Optional[int]:
        return heapq.heappop(self._heap) if self._heap else None  # clean: returned to the caller

    def occupy_below(self, bound: int) -> Optional[int]:
        if not self._heap:
            return None
        index = heapq.heappop(self._heap)  # clean: pushed back when it is not below the bound
        if index >= bound:
            heapq.heappush(self._heap, index)
            return None
        return index

    def vacate(self, index: int) -> None:
        heapq.heappush(self._heap, index)


class Quota(NamedTuple):
    tokens: int
    serial: int


class TokenBudget:
    def __init__(self, total: int) -> None:
        self.left = total
        self._serial = itertools.count()

    def debit(self, tokens: int) -> Quota:
        if tokens > self.left:
            raise AdmissionRejected(f"{tokens} tokens wanted, {self.left} left")
        self.left -= tokens  # clean: carried in the quota that is returned
        return Quota(tokens, next(self._serial))

    def credit(self, quota: Quota) -> None:
        self.left += quota.tokens


class LogprobBuffers:
    def __init__(self, count: int, width: int) -> None:
        self._stack = [np.zeros((width,), np.float32) for _ in range(count)]

    def get(self) -> Optional[np.ndarray]:
        if self._stack:
            return self._stack.pop()  # clean: returned
        return None

    def give(self, buf: np.ndarray) -> None:
        buf.fill(0)
        self._stack.append(buf)


@dataclass
class Request:
    rid: str
    prompt: List[int]
    max_new: int = 128
    want_logprobs: bool = False
    status: Status = Status.WAITING
    slot: Optional[int] = None
    quota: Optional[Quota] = None
    logprobs: Optional[np.ndarray] = None
    output: List[int] = field(default_factory=list)

    @property
    def footprint(self) -> int:
        return len(self.prompt) + self.max_new


class Scheduler:
    def __init__(self, max_batch: int, max_tokens: int, lp_buffers: int = 8) -> None:
        self.slots = SlotHeap(max_batch)
        self.budget = TokenBudget(max_tokens)
        self.buffers = LogprobBuffers(lp_buffers, 4096)
        self.waiting: Deque[Request] = deque()
        self.running: "OrderedDict[str, Request]" = OrderedDict()
        self.preempted: Deque[Request] = deque()
        self._reserved: Dict[str, Tuple[int, Quota]] = {}

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    # ------------------------------------------------------------------ admit

    def _admit_one(self, req: Request) -> bool:
        slot = self.slots.occupy()  # clean: vacated when the budget refuses, else attached to the request
        if slot is None:
            return False
        try:
            quota = self.budget.debit(req.footprint)  # leak: without a log-prob buffer only the slot is undone, the quota is a local
        except AdmissionRejected:
            self.slots.vacate(slot)
            return False
        if req.want_logprobs:
            buf = self.buffers.get()  # clean: None, or attached to the request and given back by _detach
            if buf is None:
                self.slots.vacate(slot)
                return False
            req.logprobs = buf
        req.slot, req.quota = slot, quota
        req.status = Status.RUNNING
        self.running[req.rid] = req
        return True

    def schedule(self) -> List[Request]:
        self._resume_preempted()
        while self.waiting:
            req = self.waiting.popleft()
            if not self._admit_one(req):
                self.waiting.appendleft(req)
                break
        return list(self.running.values())

    def _resume_preempted(self) -> None:
        for _ in range(len(self.preempted)):
            req = self.preempted.popleft()
            index = self.slots.occupy()  # leak: when debit refuses, the handler queues the request again and goes on without vacating
            if index is None:
                self.preempted.appendleft(req)
                return
            try:
                req.quota = self.budget.debit(req.footprint)  # clean: the request holds no quota while preempted, and _detach credits this one
            except AdmissionRejected:
                self.preempted.append(req)
                continue
            req.slot = index
            req.status = Status.RUNNING
            self.running[req.rid] = req

    def admit_small(self, req: Request, bound: int) -> bool:
        """Captured graphs exist only for low batch indices."""
        index = self.slots.occupy_below(bound)  # clean: 0 is a valid index, and the identity test treats it as one
        if index is None:
            return False
        if req.footprint > self.budget.left:
            self.slots.vacate(index)
            return False
        req.quota = self.budget.debit(req.footprint)  # clean: the size was just compared, and the running request owns it
        req.slot = index
        req.status = Status.RUNNING
        self.running[req.rid] = req
        return True

    # ------------------------------------------------------- reservations

    def reserve(self, rid: str, tokens: int) -> None:
        """Hold room for a request whose prompt is still being tokenised."""
        if rid in self._reserved:
            return
        quota = self.budget.debit(tokens)  # leak: renew puts another quota in the table over this one without crediting it
        index = self.slots.occupy()  # clean: a taken index is always put in the table
        if index is None:
            self.budget.credit(quota)
            raise AdmissionRejected(f"{rid}: no batch slot")
        self._reserved[rid] = (index, quota)

    def renew(self, rid: str, tokens: int) -> None:
        """The tokeniser found a longer prompt than announced."""
        index, old = self._reserved[rid]
        extra = self.budget.debit(tokens)  # leak: a second, longer renew overwrites it in the same way
        if tokens > old.tokens:
            self._reserved[rid] = (index, extra)
        else:
            self.budget.credit(extra)

    def claim(self, req: Request) -> bool:
        held = self._reserved.pop(req.rid, None)
        if held is None:
            return False
        req.slot, req.quota = held
        req.status = Status.RUNNING
        self.running[req.rid] = req
        return True

    def expire(self, rid: str) -> None:
        held = self._reserved.pop(rid, None)
        if held is not None:
            self.slots.vacate(held[0])
            self.budget.credit(held[1])

    # ------------------------------------------------------------- teardown

    def _detach(self, req: Request) -> None:
        if req.slot is not None:
            self.slots.vacate(req.slot)
            req.slot = None
        if req.quota is not None:
            self.budget.credit(req.quota)
            req.quota = None
        if req.logprobs is not None:
            self.buffers.give(req.logprobs)
            req.logprobs = None

    def preempt_last(self) -> Optional[Request]:
        if not self.running:
            return None
        _, req = self.running.popitem()
        self._detach(req)
        req.status = Status.PREEMPTED
        self.preempted.append(req)
        return req

    def score_prompt(self, req: Request) -> Optional[np.ndarray]:
        """One-shot scoring, outside of the running batch."""
        rows = self.buffers.get()  # leak: the trimmed copy is returned, the buffer stays out
        if rows is None:
            return None
        rows[: len(req.prompt)] = np.log1p(np.asarray(req.prompt, np.float32))
        return rows[: len(req.prompt)].copy()

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid)
        self._detach(req)
        req.status = Status.DONE
