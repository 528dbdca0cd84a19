"""The engine loop: admission, stepping, preemption."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Optional

from .drafting import Drafter, DraftRejected, Model
from .pages import Page, PagePool, PagesExhausted
from .request import GenRequest, PromptTooLong, Status

logger = logging.getLogger(__name__)


@dataclass
class EngineConfig:
    draft_pages: int = 256
    target_pages: int = 1024
    page_tokens: int = 16
    width: int = 4
    prompt_limit: int = 4096
    keep_on_preempt: bool = False


class Engine:
    def __init__(self, cfg: EngineConfig, draft: Model, hidden: int = 128) -> None:
        self.cfg = cfg
        self.draft_pool = PagePool(cfg.draft_pages, cfg.page_tokens, hidden)
        self.target_pool = PagePool(cfg.target_pages, cfg.page_tokens, hidden)
        self.drafter = Drafter(self.draft_pool, draft, cfg.width)
        self.waiting: deque[GenRequest] = deque()
        self.active: dict[str, GenRequest] = {}
        self._parked: dict[str, list[Page]] = {}
        self._probe: Optional[Page] = None

    def submit(self, req: GenRequest) -> None:
        self.waiting.append(req)

    # -- admission ----------------------------------------------------------
    def admit(self) -> int:
        admitted = 0
        while self.waiting:
            req = self.waiting[0]
            need = -(-len(req.prompt) // self.cfg.page_tokens)
            if need > min(len(self.draft_pool), len(self.target_pool)):
                break
            self.waiting.popleft()
            draft = self.draft_pool.draw_upto(need)  # leak: check raises PromptTooLong and the handler goes on to the next
            target = self.target_pool.draw_upto(need)  # leak: lost with the draft pages when the prompt is too long
            try:
                req.check(self.cfg.prompt_limit)
            except PromptTooLong as exc:
                logger.warning("rejecting %s", exc)
                continue
            req.adopt(draft, target)
            self._activate(req)
            admitted += 1
        return admitted

    def admit_one(self, req: GenRequest) -> bool:
        need = -(-len(req.prompt) // self.cfg.page_tokens)
        draft: list[Page] = []
        target: list[Page] = []
        try:
            req.check(self.cfg.prompt_limit)
            for _ in range(need):
                draft.append(self.draft_pool.draw())  # clean: the handler sheds both lists, success adopts them
                target.append(self.target_pool.draw())  # clean: as for the draft page
        except (PagesExhausted, PromptTooLong):
            self.draft_pool.shed_all(draft)
            self.target_pool.shed_all(target)
            return False
        req.adopt(draft, target)
        self._activate(req)
        return True

    def _activate(self, req: GenRequest) -> None:
        former = self.active.get(req.rid)
        if former is not None and former is not req:
            self.finish(former.rid)
        req.status = Status.ACTIVE
        self.active[req.rid] = req

    # -- stepping -------------------------------------------------------------
    def step(self, rid: str) -> int:
        req = self.active[rid]
        try:
            tokens = self.drafter.propose_gated(req)
            req.room_for(self.target_pool, len(tokens))
        except DraftRejected:
            tokens = []
        except PagesExhausted:
            self.preempt(rid)
            return 0
        req.output.extend(tokens)
        if len(req.output) >= req.max_new:
            self.finish(rid)
        return len(tokens)

    def verify_best(self, rid: str) -> bool:
        req = self.active.get(rid)
        if req is None:
            return False
        page = self.drafter.longest_beam(req, 4)  # clean: each branch sheds it or adopts it into the request
        if page is None:
            return False
        if page.room:
            self.draft_pool.shed(page)
            return False
        req.adopt([page], [])
        return True

    def probe(self, req: GenRequest) -> float:
        if self._probe is None:
            self._probe = self.draft_pool.draw_verified()  # clean: stays in the field until shutdown
        if self._probe is None:
            return 0.0
        return float(self._probe.tensor.abs().mean()) * len(req.prompt)

    # -- preemption -------------------------------------------------------------
    def preempt(self, rid: str) -> None:
        req = self.active.pop(rid)
        req.status = Status.PREEMPTED
        if self.cfg.keep_on_preempt:
            self._parked.setdefault(rid, []).extend(req.target_pages)
            req.target_pages = []
        req.forget(self.draft_pool, self.target_pool)
        self.waiting.append(req)

    def resume(self, req: GenRequest) -> bool:
        kept = self._parked.pop(req.rid, [])
        extra = self.target_pool.draw_exactly(1 if not kept else 0)  # clean: adopted together with the parked pages
        if extra is None:
            return False
        req.adopt([], kept + extra)
        self._activate(req)
        return True

    def rebalance(self, rid: str) -> None:
        """Give a request one page at the cost of the others."""
        donors = [r.target_pages for r in self.active.values() if r.rid != rid]
        page = self.target_pool.draw_or_steal(donors)  # leak: a request that has finished meanwhile gets nothing, the page is dropped
        req = self.active.get(rid)
        if req is not None:
            req.target_pages.append(page)

    def finish(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None:
            return
        req.status = Status.FINISHED
        req.forget(self.draft_pool, self.target_pool)

    def shutdown(self) -> None:
        for rid in list(self.active):
            self.finish(rid)
        for pages in self._parked.values():
            self.target_pool.shed_all(pages)
        self._parked.clear()
        if self._probe is not None:
            self.draft_pool.shed(self._probe)
            self._probe = None
        self.draft_pool.heal()
        self.target_pool.heal()
