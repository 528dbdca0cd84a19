"""Verification of proposals by the target model."""
from __future__ import annotations

from typing import Dict, List

from .proposer import DraftProposer, Proposal, discard
from .workspace import WorkspacePool


class Verifier:
    def __init__(self, pool: WorkspacePool, proposer: DraftProposer):
        self.pool = pool
        self.proposer = proposer
        self.pending: Dict[str, Proposal] = {}

    def enqueue(self, req_id: str, prefix: List[int]) -> bool:
        stale = self.pending.pop(req_id, None)
        if stale is not None:
            discard(self.pool, stale)
        proposal = self.proposer.propose(prefix)  # clean: near miss, a stale one is discarded first, settle discards this one
        if proposal is None:
            return False
        self.pending[req_id] = proposal
        return True

    def settle(self, req_id: str, accepted: int) -> List[int]:
        proposal = self.pending.pop(req_id, None)
        if proposal is None:
            return []
        tokens = proposal.tokens[:accepted]
        discard(self.pool, proposal)
        return tokens

    def verify(self, prefix: List[int], threshold: float) -> List[int]:
        proposal = self.proposer.propose(prefix)  # leak: discarded in the accepting branch alone
        if proposal is None or proposal.logits is None:
            return []
        if float(proposal.logits.max()) > threshold:
            tokens = list(proposal.tokens)
            discard(self.pool, proposal)
            return tokens
        return proposal.tokens[:1]

    def verify_shared(self, prefixes: List[List[int]]) -> int:
        buf = self.pool.acquire()  # clean: near miss, the proposals borrow it and it is released once after the loop
        if buf is None:
            return 0
        total = 0
        for prefix in prefixes:
            proposal = self.proposer.propose(prefix, shared=buf)  # clean: near miss, with a shared buffer nothing is acquired
            if proposal is None:
                break
            total += len(proposal.tokens)
        self.pool.release(buf)
        return total
