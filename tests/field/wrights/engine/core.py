from __future__ import annotations

import logging
from collections import deque
from typing import Callable

from .kv import KVCacheManager, SlotPool
from .request import Request, Status

logger = logging.getLogger(__name__)

Model = Callable[[Request], int]


class EngineCore:
    def __init__(self, kv: KVCacheManager, sampler: SlotPool, grammar: SlotPool, model: Model) -> None:
        self.kv = kv
        self.sampler = sampler
        self.grammar = grammar
        self.model = model
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.scratch: dict[str, list[int]] = {}

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def _admit(self, request: Request) -> bool:
        row = self.sampler.assign()  # clean: near miss, -1 stands for none; unassigned when the blocks fail, else the request's
        if row < 0:
            return False
        if not self.kv.allocate_slots(request):  # clean: the request's blocks are freed in _release
            self.sampler.unassign(row)
            return False
        request.sampler_slot = row
        if request.guided:
            request.grammar_slot = self.grammar.assign()  # leak: _release asks guided, which abort() has cleared by then
        request.status = Status.RUNNING
        return True

    def _release(self, request: Request) -> None:
        self.kv.free(request)
        if request.sampler_slot is not None:
            self.sampler.unassign(request.sampler_slot)
            request.sampler_slot = None
        if request.guided and request.grammar_slot is not None and request.grammar_slot >= 0:
            self.grammar.unassign(request.grammar_slot)
        request.grammar_slot = None

    def schedule(self) -> list[Request]:
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue
            while not self.kv.allocate_slots(request):  # clean: blocks go into the request; a victim's are freed
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
        while self.waiting:
            request = self.waiting[0]
            if not self._admit(request):  # clean: a request that is admitted joins running
                break
            self.waiting.popleft()
            self.running.append(request)
        return self.running

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status = Status.PREEMPTED
        self.waiting.appendleft(request)

    def step(self) -> list[Request]:
        finished = []
        for request in self.schedule():
            request.output.append(self.model(request))
            if request.done:
                request.status = Status.FINISHED
                finished.append(request)
        for request in finished:
            self._release(request)
        self.running = [r for r in self.running if r.status is Status.RUNNING]
        return finished

    def abort(self, request_id: str) -> bool:
        for request in self.running:
            if request.request_id == request_id:
                request.guided = False
                request.status = Status.FINISHED
                self._release(request)
                self.running.remove(request)
                return True
        return False

    def score(self, request: Request) -> float | None:
        """Log-likelihood of a prompt, outside the batch."""
        ids = self.kv.get_new_blocks(self.kv.blocks_needed(request))  # leak: no sampler row returns None with the blocks taken
        if ids is None:
            return None
        row = self.sampler.assign()  # clean: unassigned at the end
        if row < 0:
            return None
        value = sum(request.prompt) / (1 + row)
        self.kv.free_blocks(ids)
        self.sampler.unassign(row)
        return value

    def encode(self, request: Request) -> list[int]:
        ids = self.kv.get_new_blocks(self.kv.blocks_needed(request))  # clean: near miss, an empty or missing list has nothing to free
        if not ids:
            return []
        vector = [t % 7 for t in request.prompt]
        self.kv.free_blocks(ids)
        return vector

    def open_scratch(self, request: Request, n: int) -> bool:
        ids = self.kv.get_new_blocks(n)  # leak: close_scratch frees all but the first block
        if ids is None:
            return False
        self.close_scratch(request)
        self.scratch[request.request_id] = ids
        return True

    def close_scratch(self, request: Request) -> None:
        ids = self.scratch.pop(request.request_id, None)
        if ids:
            self.kv.free_blocks(ids[1:])

    def hand_over(self, request: Request, other: "EngineCore") -> bool:
        """Move a running request to another engine; its KV is copied block by block."""
        ids = other.kv.get_new_blocks(len(request.blocks))  # clean: near miss, freed when the row is missing, else the request's
        if ids is None:
            return False
        row = other.sampler.assign()  # clean: becomes the request's row
        if row < 0:
            other.kv.free_blocks(ids)
            return False
        self.running.remove(request)
        self._release(request)
        request.blocks, request.sampler_slot = ids, row
        other.running.append(request)
        return True
