"""Draft side: proposes `depth` tokens per running sequence."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch

from .pool import DraftRows, ScratchPool


@dataclass
class Proposal:
    tokens: torch.Tensor
    probs: torch.Tensor
    depth: int


class Drafter:
    def __init__(self, scratch: ScratchPool, rows: DraftRows, vocab: int, depth: int) -> None:
        self.scratch = scratch
        self.rows = rows
        self.vocab = vocab
        self.depth = depth
        self.row_of: dict[str, int] = {}

    def attach(self, rid: str) -> bool:
        if rid in self.row_of:
            return True
        row = self.rows.claim()  # clean: kept in row_of until detach()
        if row is None:
            return False
        self.row_of[rid] = row
        return True

    def detach(self, rid: str) -> None:
        row = self.row_of.pop(rid, None)
        if row is not None:
            self.rows.vacate(row)

    def reattach(self, rid: str) -> bool:
        """Give a preempted sequence a fresh row, its old KV being stale."""
        row = self.rows.claim()  # clean: near miss, it replaces a row that is vacated first
        if row is None:
            return False
        if rid in self.row_of:
            self.rows.vacate(self.row_of[rid])
        self.row_of[rid] = row
        return True

    def logits(self, batch: int) -> torch.Tensor:
        out = self.scratch.lease(batch, self.vocab)  # clean: handed to the caller
        out.normal_()
        return out

    def propose(self, batch: int) -> Proposal:
        tokens = self.scratch.lease(batch, self.depth)  # clean: inside the Proposal, discard() restores it
        probs = self.scratch.lease(batch, self.depth)  # clean: inside the Proposal, discard() restores it
        for step in range(self.depth):
            logits = self.logits(batch)  # clean: restored at the end of each pass
            torch.softmax(logits, dim=-1, out=logits)
            best = logits.max(dim=-1)
            tokens[:, step] = best.indices
            probs[:, step] = best.values
            self.scratch.restore(logits)
        return Proposal(tokens, probs, self.depth)

    def discard(self, proposal: Proposal) -> None:
        self.scratch.restore(proposal.tokens)
        self.scratch.restore(proposal.probs)

    def propose_greedy(self, batch: int) -> list[list[int]]:
        tokens = self.scratch.lease(batch, self.depth)  # clean: restored before return
        for step in range(self.depth):
            logits = self.logits(batch)  # leak: each pass rebinds it, only the last one is restored
            tokens[:, step] = logits.argmax(dim=-1)
        if self.depth:
            self.scratch.restore(logits)
        rows = tokens.long().tolist()
        self.scratch.restore(tokens)
        return rows

    def top_tokens(self, batch: int, k: int) -> torch.Tensor:
        return self.logits(batch).topk(k, dim=-1).indices.clone()  # leak: pooled logits read and dropped

    def entropy(self, batch: int) -> float:
        with self.scratch.leased(batch, self.vocab) as probs:  # clean: context manager restores
            probs.normal_()
            torch.softmax(probs, dim=-1, out=probs)
            return float(-(probs * probs.log()).sum(dim=-1).mean())

    def ngram_propose(self, history: list[int], n: int) -> Optional[torch.Tensor]:
        """Prompt look-up proposal; None when the suffix does not occur earlier."""
        out = self.scratch.lease(1, self.depth)  # leak: not restored when no earlier n-gram matches
        suffix = history[-n:]
        for start in range(len(history) - n - 1, -1, -1):
            if history[start:start + n] == suffix:
                cont = history[start + n:start + n + self.depth]
                out.zero_()
                out[0, :len(cont)] = torch.tensor(cont)
                return out
        return None
