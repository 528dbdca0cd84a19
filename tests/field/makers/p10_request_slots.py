"""Continuous batching: decode slots and adapter slots carried by requests."""
from __future__ import annotations

import heapq
import logging
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Deque, Dict, List, Optional, Set

import torch

logger = logging.getLogger(__name__)


class State(Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    REJECTED = 3


class SlotPool:
    """Lowest free index first keeps the batch dense."""

    def __init__(self, n: int) -> None:
        self._heap = list(range(n))
        self._taken: Set[int] = set()

    def take(self) -> int:
        if not self._heap:
            return -1
        slot = heapq.heappop(self._heap)  # clean: noted in _taken and returned
        self._taken.add(slot)
        return slot

    def give(self, slot: int) -> None:
        if slot in self._taken:
            self._taken.remove(slot)
            heapq.heappush(self._heap, slot)


@dataclass
class Request:
    rid: str
    prompt: List[int]
    adapter: Optional[str] = None
    slot: int = -1
    adapter_slot: int = -1
    state: State = State.WAITING
    output: List[int] = field(default_factory=list)


class Engine:
    def __init__(self, max_batch: int, max_adapters: int, max_len: int, device) -> None:
        self.slots = SlotPool(max_batch)
        self.adapters = SlotPool(max_adapters)
        self.max_len = max_len
        self.cache = torch.zeros(max_batch, max_len, 128, device=device)
        self.waiting: Deque[Request] = deque()
        self.running: Dict[str, Request] = {}
        self.pinned: Dict[str, int] = {}

    def submit(self, req: Request) -> None:
        self.waiting.append(req)

    def admit(self) -> int:
        count = 0
        while self.waiting:
            req = self.waiting[0]
            slot = self.slots.take()  # clean: near miss, given back when no adapter slot, otherwise in the request
            if slot < 0:
                break
            if req.adapter is not None:
                aslot = self.adapters.take()  # clean: stored in the request, retired by _retire
                if aslot < 0:
                    self.slots.give(slot)
                    break
                req.adapter_slot = aslot
            req.slot = slot
            req.state = State.RUNNING
            self.waiting.popleft()
            self.running[req.rid] = req
            count += 1
        return count

    def admit_priority(self, req: Request) -> bool:
        req.slot = self.slots.take()  # leak: a too long prompt is rejected with its slot
        if req.slot < 0:
            self.waiting.appendleft(req)
            return False
        if len(req.prompt) >= self.max_len:
            req.state = State.REJECTED
            return False
        req.state = State.RUNNING
        self.running[req.rid] = req
        return True

    def _retire(self, req: Request) -> None:
        if req.slot >= 0:
            self.slots.give(req.slot)
            req.slot = -1
        if req.adapter_slot >= 0:
            self.adapters.give(req.adapter_slot)
            req.adapter_slot = -1
        req.state = State.FINISHED

    def step(self, logits: torch.Tensor, eos: int) -> List[Request]:
        done = []
        for rid in list(self.running):
            req = self.running[rid]
            token = int(logits[req.slot].argmax())
            req.output.append(token)
            if token == eos or len(req.output) >= self.max_len:
                self._retire(self.running.pop(rid))  # clean: retired on the spot
                done.append(req)
        return done

    def abort(self, rid: str) -> bool:
        req = self.running.pop(rid, None)  # leak: a request without output is dropped before _retire
        if req is None:
            return False
        if not req.output:
            logger.info("aborted %s before its first token", rid)
            return True
        self._retire(req)
        return True

    def preempt(self, keep: int) -> None:
        victims = sorted(self.running.values(), key=lambda r: len(r.output))[keep:]
        for req in victims:
            del self.running[req.rid]
            self._retire(req)
            req.state = State.WAITING
            self.waiting.appendleft(req)

    def pin_adapter(self, name: str) -> int:
        if name in self.pinned:
            return self.pinned[name]
        slot = self.adapters.take()  # clean: near miss, minus one means nothing was taken, else kept in pinned
        if slot >= 0:
            self.pinned[name] = slot
        return slot

    def unpin_adapter(self, name: str) -> None:
        slot = self.pinned.pop(name, -1)  # clean: given back when it was pinned
        if slot >= 0:
            self.adapters.give(slot)

    def shutdown(self) -> None:
        for req in self.running.values():
            self._retire(req)
        self.running.clear()
        for name in list(self.pinned):
            self.unpin_adapter(name)


def fork_request(engine: Engine, parent: Request, n: int) -> List[Request]:
    children: List[Request] = []
    for i in range(n):
        slot = engine.slots.take()  # leak: running out part way returns an empty list, earlier children keep their slots
        if slot < 0:
            return []
        engine.cache[slot].copy_(engine.cache[parent.slot])
        children.append(Request(f"{parent.rid}.{i}", parent.prompt, slot=slot, state=State.RUNNING))
    for child in children:
        engine.running[child.rid] = child
    return children


def measure_prefill(engine: Engine, lengths: List[int]) -> Dict[int, float]:
    seen: Dict[int, float] = {}
    slot = engine.slots.take()  # clean: near miss, loop may skip but the slot is given after it
    if slot < 0:
        return seen
    for n in lengths:
        if n in seen:
            continue
        seen[n] = engine.cache[slot, :n].sum().item()
    engine.slots.give(slot)
    return seen


def dry_run(engine: Engine, prompts: List[List[int]]) -> int:
    longest = 0
    for p in prompts:
        slot = engine.slots.take()  # leak: prompts beyond max_len break out holding the slot
        if slot < 0:
            break
        if len(p) > engine.max_len:
            break
        engine.cache[slot, : len(p)] = 0
        longest = max(longest, len(p))
        engine.slots.give(slot)
    return longest
