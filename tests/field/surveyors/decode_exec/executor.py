from __future__ import annotations

from collections import deque
from typing import Callable, Optional

from .resources import KVCacheManager, SeqSlotManager
from .types import LlmRequest, RequestState


class DecodeExecutor:
    def __init__(self, slots: SeqSlotManager, drafts: SeqSlotManager, cache: KVCacheManager) -> None:
        self.slots = slots
        self.drafts = drafts
        self.cache = cache
        self.queue: deque[LlmRequest] = deque()
        self.active: list[LlmRequest] = []
        self.in_transfer: dict[int, LlmRequest] = {}

    def _terminate(self, req: LlmRequest) -> None:
        if req.seq_slot is not None:
            self.slots.remove_slot(req.seq_slot)
            req.seq_slot = None
        self.cache.unreserve_pages(req.pages)
        req.pages = []
        req.state = RequestState.DONE

    def admit(self) -> int:
        admitted = 0
        while self.queue:
            req = self.queue[0]
            slot = self.slots.add_slot(req.request_id)  # clean: near miss, removed when pages run short, else _terminate removes it
            if slot is None:
                break
            pages = self.cache.reserve_pages(len(req.tokens))  # clean: kept by the request until _terminate
            if pages is None:
                self.slots.remove_slot(slot)
                break
            req.seq_slot, req.pages = slot, pages
            req.state = RequestState.CONTEXT
            self.active.append(self.queue.popleft())
            admitted += 1
        return admitted

    def attach_draft(self, req: LlmRequest) -> bool:
        if req.draft_slot is None:
            req.draft_slot = self.drafts.add_slot(req.request_id)  # leak: _terminate forgets draft_slot
        return req.draft_slot is not None

    def grow(self, req: LlmRequest, tokens: int) -> bool:
        more = self.cache.reserve_pages(tokens)  # clean: near miss, joined to the pages of the request
        if more is None:
            return False
        req.pages += more
        return True

    def regrow(self, req: LlmRequest) -> bool:
        pages = self.cache.reserve_pages(len(req.tokens) + req.max_new_tokens)  # leak: the pages the request held are overwritten
        if pages is None:
            return False
        req.pages = pages
        return True

    def receive_context(self, req: LlmRequest, start: Callable[[list[int]], bool]) -> bool:
        pages = self.cache.reserve_pages(len(req.tokens))  # leak: a transfer that does not start gives the slot back and not the pages
        if pages is None:
            return False
        slot = self.slots.add_slot(req.request_id)  # clean: near miss, removed where the transfer does not start, else kept by the request
        if slot is None:
            self.cache.unreserve_pages(pages)
            return False
        if not start(pages):
            self.slots.remove_slot(slot)
            return False
        req.pages, req.seq_slot = pages, slot
        req.state = RequestState.TRANSFER
        self.in_transfer[req.request_id] = req
        return True

    def transfer_done(self, request_id: int) -> None:
        req = self.in_transfer.pop(request_id)
        req.state = RequestState.GENERATION
        self.active.append(req)

    def estimate_capacity(self, tokens: int) -> int:
        trial: list[list[int]] = []
        while (pages := self.cache.reserve_pages(tokens)):  # clean: near miss, every trial reservation is given back below
            trial.append(pages)
        for pages in trial:
            self.cache.unreserve_pages(pages)
        return len(trial)

    def warm_up(self, run: Callable[[int], bool], rounds: int) -> int:
        done = 0
        for i in range(rounds):
            slot = self.slots.add_slot(-1 - i)  # leak: a round that fails continues without remove_slot
            if slot is None:
                break
            if not run(slot):
                continue
            self.slots.remove_slot(slot)
            done += 1
        return done

    def step(self, forward: Callable[[list[LlmRequest]], list[int]], eos: int) -> list[LlmRequest]:
        finished: list[LlmRequest] = []
        for req, token in zip(list(self.active), forward(self.active)):
            req.tokens.append(token)
            req.max_new_tokens -= 1
            if token == eos or req.max_new_tokens <= 0:
                self.active.remove(req)
                self._terminate(req)
                finished.append(req)
        return finished

    def cancel(self, request_id: int) -> bool:
        req: Optional[LlmRequest] = self.in_transfer.pop(request_id, None)
        if req is None:
            req = next((r for r in self.active if r.request_id == request_id), None)
            if req is None:
                return False
            self.active.remove(req)
        self._terminate(req)
        return True
