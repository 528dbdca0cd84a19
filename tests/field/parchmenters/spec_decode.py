"""Speculative decoding: paired draft/target KV blocks for rollout requests."""
from __future__ import annotations

import heapq
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Callable, Sequence

logger = logging.getLogger(__name__)


class BlockStore:
    def __init__(self, name: str, total: int, block: int = 16):
        self.name = name
        self.block = block
        self._heap = list(range(total))
        heapq.heapify(self._heap)

    def carve(self, n: int) -> list[int] | None:
        if n > len(self._heap):
            return None
        return [heapq.heappop(self._heap) for _ in range(n)]  # clean: returned to the caller

    def carve_run(self, n: int) -> list[int] | None:
        """``n`` neighbouring blocks, for kernels that want one extent."""
        run: list[int] = []
        aside: list[int] = []
        while self._heap and len(run) < n:
            b = heapq.heappop(self._heap)  # leak: the blocks set aside are not pushed back when a run is found
            if run and b != run[-1] + 1:
                aside.extend(run)
                run = []
            run.append(b)
        if len(run) < n:
            for b in aside + run:
                heapq.heappush(self._heap, b)
            return None
        return run

    def melt(self, blocks: Sequence[int]) -> None:
        for b in blocks:
            heapq.heappush(self._heap, b)

    def need(self, tokens: int) -> int:
        return -(-tokens // self.block)


@dataclass
class SpecRequest:
    rid: str
    tokens: list[int]
    speculate: bool = True
    target_blocks: list[int] = field(default_factory=list)
    draft_blocks: list[int] = field(default_factory=list)


@dataclass
class Branch:
    score: float
    tokens: list[int]
    blocks: list[int]


class SpecWorker:
    def __init__(self, target: BlockStore, draft: BlockStore, propose: Callable, verify: Callable):
        self.target = target
        self.draft = draft
        self.propose = propose
        self.verify = verify
        self.active: dict[str, SpecRequest] = {}

    def begin(self, req: SpecRequest) -> bool:
        t = self.target.carve(self.target.need(len(req.tokens)))  # leak: not melted when the draft store is short
        if t is None:
            return False
        d = self.draft.carve(self.draft.need(len(req.tokens)))  # clean: in req.draft_blocks, finish() melts them
        if d is None:
            logger.debug("%s: draft store short", req.rid)
            return False
        req.target_blocks, req.draft_blocks = t, d
        self.active[req.rid] = req
        return True

    def begin_or_plain(self, req: SpecRequest) -> bool:
        """Without draft blocks the request runs unspeculated."""
        d = self.draft.carve(self.draft.need(len(req.tokens)))  # clean: near miss, melted on the refusal, otherwise in the request
        t = self.target.carve(self.target.need(len(req.tokens)))  # clean: in req.target_blocks, finish() melts them
        if t is None:
            if d is not None:
                self.draft.melt(d)
            return False
        req.speculate = d is not None
        req.target_blocks, req.draft_blocks = t, d or []
        self.active[req.rid] = req
        return True

    def finish(self, req: SpecRequest) -> None:
        self.active.pop(req.rid, None)
        self.target.melt(req.target_blocks)
        self.draft.melt(req.draft_blocks)
        req.target_blocks, req.draft_blocks = [], []

    def step(self, req: SpecRequest, k: int) -> int:
        look = self.draft.carve(self.draft.need(k))  # clean: near miss, split between the request and melt() on every way
        if look is None:
            return 0
        guess = self.propose(req, look, k)
        accepted = self.verify(req, guess)
        if not accepted:
            self.draft.melt(look)
            return 0
        kept = self.draft.need(len(accepted))
        req.draft_blocks += look[:kept]
        self.draft.melt(look[kept:])
        req.tokens += accepted
        return len(accepted)

    def step_all(self, k: int) -> int:
        n = 0
        for req in list(self.active.values()):
            if not req.speculate:
                continue
            look = self.draft.carve(self.draft.need(k))  # leak: a fully rejected guess goes on to the next request
            if look is None:
                break
            accepted = self.verify(req, self.propose(req, look, k))
            if not accepted:
                continue
            req.draft_blocks += look
            req.tokens += accepted
            n += len(accepted)
        return n

    def grow_target(self, req: SpecRequest) -> bool:
        missing = self.target.need(len(req.tokens)) - len(req.target_blocks)
        if missing <= 0:
            return True
        more = self.target.carve(missing)  # clean: added to the request's blocks
        if more is None:
            return False
        req.target_blocks.extend(more)
        return True

    def tree_step(self, req: SpecRequest, width: int, k: int) -> int:
        """Several branches, the best is kept."""
        branches: list[Branch] = []
        for w in range(width):
            blocks = self.draft.carve(self.draft.need(k))  # leak: blocks of the branches that lose are dropped with the list
            if blocks is None:
                break
            tokens, score = self.propose(req, blocks, k, w)
            branches.append(Branch(score, tokens, blocks))
        if not branches:
            return 0
        best = max(branches, key=lambda b: b.score)
        req.draft_blocks += best.blocks
        req.tokens += best.tokens
        return len(best.tokens)

    def prefill_pair(self, req: SpecRequest, run_target: Callable, run_draft: Callable) -> bool:
        n = len(req.tokens)
        with ExitStack() as undo:
            t = self.target.carve(self.target.need(n))  # clean: near miss, the stack melts it until pop_all()
            if t is None:
                return False
            undo.callback(self.target.melt, t)
            d = self.draft.carve(self.draft.need(n))  # clean: near miss, the stack melts it until pop_all()
            if d is None:
                return False
            undo.callback(self.draft.melt, d)
            if not (run_target(req, t) and run_draft(req, d)):
                return False
            undo.pop_all()
        req.target_blocks, req.draft_blocks = t, d
        self.active[req.rid] = req
        return True

class LookaheadWindow:
    """Draft blocks that stay with a request as long as it speculates."""

    def __init__(self, store: BlockStore, k: int):
        self.store = store
        self.k = k
        self.windows: dict[str, list[int]] = {}

    def enable(self, req: SpecRequest) -> bool:
        window = self.store.carve(self.store.need(self.k))  # leak: retire() skips the window after disable() cleared the flag
        if window is None:
            return False
        self.windows[req.rid] = window
        req.speculate = True
        return True

    def disable(self, req: SpecRequest) -> None:
        req.speculate = False

    def retire(self, req: SpecRequest) -> None:
        window = self.windows.pop(req.rid, None)
        if window is not None and req.speculate:
            self.store.melt(window)
