"""Speculative decoding worker: draft proposals, tree masks and verification.

All step-sized tensors come from a shape-keyed workspace so that a steady batch size
allocates nothing.
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

import torch

Shape = Tuple[int, ...]


class Workspace:
    def __init__(self, device: str = "cuda", limit: int = 256) -> None:
        self.device = device
        self.limit = limit
        self.live = 0
        self._cached: Dict[Tuple[Shape, torch.dtype], List[torch.Tensor]] = defaultdict(list)

    def borrow(self, shape: Shape, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        stack = self._cached[(tuple(shape), dtype)]
        self.live += 1
        if stack:
            return stack.pop()  # clean: returned to the caller
        return torch.empty(shape, dtype=dtype, device=self.device)

    def try_borrow(self, shape: Shape, dtype: torch.dtype = torch.float16) -> Optional[torch.Tensor]:
        if self.live >= self.limit:
            return None
        return self.borrow(shape, dtype)  # clean: returned to the caller

    def repay(self, *tensors: torch.Tensor) -> None:
        for t in tensors:
            self.live -= 1
            self._cached[(tuple(t.shape), t.dtype)].append(t)


@dataclass
class Proposal:
    tokens: torch.Tensor
    probs: torch.Tensor
    lengths: List[int] = field(default_factory=list)


class DraftWorker:
    def __init__(self, model, ws: Workspace, k: int, vocab: int) -> None:
        self.model = model
        self.ws = ws
        self.k = k
        self.vocab = vocab
        self.hidden: Optional[torch.Tensor] = None

    def propose(self, last: torch.Tensor) -> Optional[Proposal]:
        bs = last.shape[0]
        tokens = self.ws.borrow((bs, self.k), torch.int64)  # leak: not repaid when there is no room for probs
        probs = self.ws.try_borrow((bs, self.k, self.vocab))  # clean: None on the early exit, else owned by the proposal
        if probs is None:
            return None
        cur = last
        for i in range(self.k):
            logits = self.embed(cur)  # clean: repaid at the end of the iteration
            torch.softmax(logits, dim=-1, out=probs[:, i])
            cur = probs[:, i].argmax(-1)
            tokens[:, i] = cur
            self.ws.repay(logits)
        return Proposal(tokens, probs)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits in a workspace tensor; the caller repays it."""
        out = self.ws.borrow((tokens.shape[0], self.vocab))  # clean: returned to the caller
        self.model(tokens, out=out)
        return out

    def greedy_one(self, last: torch.Tensor) -> torch.Tensor:
        logits = self.embed(last)  # leak: argmax makes a new tensor and the logits are dropped
        return logits.argmax(-1)

    def carry_hidden(self, hidden: torch.Tensor) -> None:
        """Keep the target's hidden states for the next draft step (EAGLE style)."""
        kept = self.ws.borrow(tuple(hidden.shape), hidden.dtype)  # clean: near miss, the previous self.hidden is repaid first
        kept.copy_(hidden)
        if self.hidden is not None:
            self.ws.repay(self.hidden)
        self.hidden = kept

    def reset(self) -> None:
        if self.hidden is not None:
            self.ws.repay(self.hidden)
            self.hidden = None


class Verifier:
    def __init__(self, target, ws: Workspace, vocab: int, tree: bool = False) -> None:
        self.target = target
        self.ws = ws
        self.vocab = vocab
        self.tree = tree

    def verify(self, prop: Proposal) -> List[int]:
        bs, k = prop.tokens.shape
        mask = None
        if self.tree:
            mask = self.ws.borrow((bs, k, k), torch.bool)  # clean: near miss, repaid under the same flag
            mask.fill_(True).tril_()
        logits = self.ws.borrow((bs, k, self.vocab))  # clean: repaid below
        self.target(prop.tokens, mask=mask, out=logits)
        accepted = self._count(prop, logits)
        self.ws.repay(logits)
        if self.tree:
            self.ws.repay(mask)
        return accepted

    def verify_sampled(self, prop: Proposal, temperature: float) -> List[int]:
        bs, k = prop.tokens.shape
        noise = self.ws.borrow((bs, k), torch.float32) if temperature > 0 else None  # leak: only repaid for tree batches
        logits = self.ws.borrow((bs, k, self.vocab))  # clean: repaid in finally
        try:
            self.target(prop.tokens, mask=None, out=logits)
            if noise is not None:
                noise.uniform_()
                ratio = logits.gather(-1, prop.tokens.unsqueeze(-1)).squeeze(-1).exp()
                accepted = (noise < ratio).int().cumprod(-1).sum(-1).tolist()
            else:
                accepted = self._count(prop, logits)
        finally:
            self.ws.repay(logits)
        if self.tree and noise is not None:
            self.ws.repay(noise)
        return accepted

    def _count(self, prop: Proposal, logits: torch.Tensor) -> List[int]:
        hit = logits.argmax(-1).eq(prop.tokens)
        return hit.int().cumprod(-1).sum(-1).tolist()


class SpecRunner:
    def __init__(self, draft: DraftWorker, verifier: Verifier, ws: Workspace) -> None:
        self.draft = draft
        self.verifier = verifier
        self.ws = ws
        self.pending: Dict[int, Proposal] = {}

    def drop(self, prop: Proposal) -> None:
        self.ws.repay(prop.tokens, prop.probs)

    def step(self, last: torch.Tensor) -> List[int]:
        prop = self.draft.propose(last)  # clean: dropped after verification, None is handled
        if prop is None:
            return [0] * last.shape[0]
        try:
            return self.verifier.verify(prop)
        finally:
            self.drop(prop)

    def submit(self, batch_id: int, last: torch.Tensor) -> bool:
        if batch_id in self.pending:
            return False
        prop = self.draft.propose(last)  # clean: near miss, kept in self.pending until collect() or cancel()
        if prop is None:
            return False
        self.pending[batch_id] = prop
        return True

    def collect(self, batch_id: int) -> List[int]:
        prop = self.pending.pop(batch_id)
        accepted = self.verifier.verify(prop)
        self.drop(prop)
        return accepted

    def cancel(self, batch_id: int) -> None:
        prop = self.pending.pop(batch_id, None)
        if prop is not None:
            self.drop(prop)

    def best_of(self, last: torch.Tensor, rounds: int) -> Tuple[Optional[Proposal], int]:
        """Try several drafts and keep the one the target accepts furthest."""
        best, best_len = None, -1
        for _ in range(rounds):
            prop = self.draft.propose(last)  # leak: a better draft replaces best without dropping it
            if prop is None:
                break
            got = sum(self.verifier.verify(prop))
            if got > best_len:
                best, best_len = prop, got
            else:
                self.drop(prop)
        return best, best_len

    def bonus_tokens(self, last: torch.Tensor, rounds: int = 3) -> List[int]:
        prop, _ = self.best_of(last, rounds)  # leak: the last column is copied to the host and the proposal is not dropped
        if prop is None:
            return []
        return prop.tokens[:, -1].tolist()

    def acceptance_table(self, batches: List[torch.Tensor]) -> List[float]:
        rates = []
        for last in batches:
            if last.numel() == 0:
                continue
            prop = self.draft.propose(last)  # leak: continue when nothing was accepted skips the drop
            if prop is None:
                continue
            accepted = self.verifier.verify(prop)
            if not any(accepted):
                continue
            rates.append(sum(accepted) / (len(accepted) * self.draft.k))
            self.drop(prop)
        return rates

    def shutdown(self) -> None:
        for batch_id in list(self.pending):
            self.cancel(batch_id)
        self.draft.reset()
