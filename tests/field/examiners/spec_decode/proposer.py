"""Draft proposals; a proposal may own the workspace that holds its logits."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, List, Optional

import torch

from .workspace import WorkspacePool, workspace

Model = Callable[[List[int], torch.Tensor], int]


@dataclass
class Proposal:
    tokens: List[int]
    logits: Optional[torch.Tensor] = None
    owns_logits: bool = False


def discard(pool: WorkspacePool, proposal: Proposal) -> None:
    if proposal.owns_logits and proposal.logits is not None:
        pool.release(proposal.logits)
    proposal.logits = None
    proposal.owns_logits = False


class DraftProposer:
    def __init__(self, pool: WorkspacePool, model: Model, k: int):
        self.pool = pool
        self.model = model
        self.k = k

    def _draft(self, prefix: List[int], logits: torch.Tensor) -> List[int]:
        tokens: List[int] = []
        for _ in range(self.k):
            tokens.append(self.model(prefix + tokens, logits))
        return tokens

    def propose(self, prefix: List[int], shared: Optional[torch.Tensor] = None) -> Optional[Proposal]:
        """The caller discards the proposal."""
        logits = shared
        if logits is None:
            logits = self.pool.acquire()  # clean: near miss, owns_logits is true for just this case
            if logits is None:
                return None
        tokens = self._draft(prefix, logits)
        return Proposal(tokens, logits, owns_logits=shared is None)

    def propose_tokens(self, prefix: List[int]) -> List[int]:
        proposal = self.propose(prefix)  # leak: only the tokens are returned, the workspace of the proposal is lost
        return proposal.tokens if proposal is not None else []

    def draft_tokens(self, prefix: List[int]) -> List[int]:
        with workspace(self.pool, wait=False) as logits:  # clean: near miss, the return inside with still releases
            if logits is None:
                return []
            return self._draft(prefix, logits)

    def propose_best(self, prefixes: List[List[int]]) -> Optional[Proposal]:
        """The longest proposal, for the caller to discard."""
        best: Optional[Proposal] = None
        for prefix in prefixes:
            cand = self.propose(prefix)  # leak: a better candidate replaces the former best without discard
            if cand is None:
                continue
            if best is None or len(cand.tokens) > len(best.tokens):
                best = cand
            else:
                discard(self.pool, cand)
        return best

    def propose_longest(self, prefixes: List[List[int]]) -> Optional[Proposal]:
        """The longest proposal, for the caller to discard."""
        best: Optional[Proposal] = None
        for prefix in prefixes:
            cand = self.propose(prefix)  # clean: near miss, the loser of each comparison is discarded
            if cand is None:
                continue
            if best is not None and len(cand.tokens) > len(best.tokens):
                best, cand = cand, best
            if best is None:
                best = cand
            else:
                discard(self.pool, cand)
        return best
