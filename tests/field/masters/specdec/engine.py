from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from .pools import DraftLease, DraftPool, MaskRing, NoDraft, NodePool
from .tree import TokenTree
from .verify import verify, verify_many

log = logging.getLogger("specdec")


@dataclass
class Request:
    toks: list[int]
    max_new: int = 256
    speculating: bool = True
    lease: DraftLease | None = None
    out: list[int] = field(default_factory=list)
    accepted: float = 2.0
    ngrams: dict[int, list[int]] = field(default_factory=dict)


class Engine:
    def __init__(self, target, draft, drafts: DraftPool, nodes: NodePool, masks: MaskRing, width=4, depth=3, floor=1.2):
        self.target, self.draft = target, draft
        self.drafts, self.nodes, self.masks = drafts, nodes, masks
        self.width, self.depth, self.floor = width, depth, floor
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()

    def start(self, req: Request) -> None:
        try:
            req.lease = self.drafts.open()  # leak: adapt() clears the flag that finish() asks before it closes the lease
        except NoDraft:
            req.speculating = False
            log.debug("plain decoding, no draft slot")
        self.running.append(req)

    def adapt(self, req: Request, n: int) -> None:
        """Stop drafting where it does not pay."""
        req.accepted = 0.9 * req.accepted + 0.1 * n
        if req.speculating and req.accepted < self.floor:
            req.speculating = False

    def finish(self, req: Request) -> None:
        self.running.remove(req)
        if req.speculating:
            req.lease.close()
            req.lease = None

    def _grow(self, tree: TokenTree, req: Request) -> None:
        if req.ngrams:
            tree.lookahead(tree.root, req.ngrams)
        level = [tree.root]
        for _ in range(self.depth):
            nxt = []
            for n in level:
                cands, probs = self.draft.top(req.lease.slot, self.nodes.tok[n], self.width)
                new = tree.expand(n, cands)
                nxt += [k for k, p in zip(new, probs) if p > 0.05]
            level = nxt
            if not level:
                break
        first = tree.kids.get(tree.root, [])
        if len(first) > self.width:
            tree.trim(tree.root, set(first[:self.width]))

    def step(self, req: Request) -> list[int]:
        ctx = req.toks + req.out
        if not req.speculating:
            new = [self.target.next(ctx)]
        else:
            tree = TokenTree(self.nodes, ctx[-1])  # clean: near miss, freed in the finally, which does nothing for an empty one
            try:
                if tree:
                    self._grow(tree, req)
                    new = verify(self.target, self.masks, tree, ctx)
                else:
                    new = [self.target.next(ctx)]
            finally:
                tree.free()
            req.lease.rewind(len(ctx))
            req.lease.commit(len(new))
            self.adapt(req, len(new))
        req.out += new
        if len(req.out) >= req.max_new:
            self.finish(req)
        return new

    def step_all(self) -> int:
        jobs, who = [], []
        for req in list(self.running):
            if not req.speculating:
                self.step(req)
                continue
            tree = TokenTree(self.nodes, (req.toks + req.out)[-1])  # leak: without masks for all we step singly and drop the trees
            if not tree:
                self.step(req)
                continue
            self._grow(tree, req)
            jobs.append((tree, req.toks + req.out))
            who.append(req)
        res = verify_many(self.target, self.masks, jobs)
        if res is None:
            return sum(len(self.step(r)) for r in who)
        for (tree, _), req, new in zip(jobs, who, res):
            tree.free()
            req.out += new
            self.adapt(req, len(new))
            if len(req.out) >= req.max_new:
                self.finish(req)
        return sum(map(len, res))

    def swap_draft(self, draft, drafts: DraftPool) -> None:
        self.draft, self.drafts = draft, drafts
        for req in self.running:
            if req.lease is None:
                continue
            old = req.lease
            try:
                req.lease = drafts.open()  # leak: the request may be one that has stopped speculating, and finish() skips it
            except NoDraft:
                req.lease, req.speculating = None, False
            old.close()

    def guess(self, toks: list[int]) -> int:
        lease = self.drafts.open()  # clean: closed in the finally
        try:
            return self.draft.top(lease.slot, toks[-1], 1)[0][0]
        finally:
            lease.close()
