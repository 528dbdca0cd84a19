"""Speculative decoding: draft model proposes, target model verifies."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import List, Optional, Protocol, Tuple

import torch

logger = logging.getLogger(__name__)


class LM(Protocol):
    def step(self, ids: torch.Tensor, kv: torch.Tensor) -> torch.Tensor: ...
    def verify(self, ids: torch.Tensor, kv: torch.Tensor) -> torch.Tensor: ...


class DraftKVPool:
    """A stack of scratch KV tensors for the draft model."""

    def __init__(self, count: int, layers: int, length: int, dim: int) -> None:
        self._stack = [torch.zeros(layers, 2, length, dim) for _ in range(count)]
        self.peak = 0
        self._count = count

    def obtain(self) -> torch.Tensor:
        if not self._stack:
            raise RuntimeError("draft KV pool is empty")
        kv = self._stack.pop()
        self.peak = max(self.peak, self._count - len(self._stack))
        return kv

    def recycle(self, kv: torch.Tensor) -> None:
        kv.zero_()
        self._stack.append(kv)


@dataclass
class SpecConfig:
    k: int = 4
    min_accept: float = 0.2
    typical: bool = False


@dataclass
class Branch:
    tokens: torch.Tensor
    kv: torch.Tensor
    score: float = 0.0


class DraftRunner:
    def __init__(self, cfg: SpecConfig, draft: LM, target: LM, pool: DraftKVPool) -> None:
        self.cfg = cfg
        self.draft = draft
        self.target = target
        self.pool = pool
        self.accepted = 0
        self.proposed = 0

    def _rate(self) -> float:
        return self.accepted / max(1, self.proposed)

    def propose(self, ids: torch.Tensor) -> Optional[torch.Tensor]:
        kv = self.pool.obtain()  # leak: a low acceptance rate returns None without recycling
        if self._rate() < self.cfg.min_accept and self.proposed > 100:
            logger.debug("speculation switched off, rate %.2f", self._rate())
            return None
        toks = []
        cur = ids
        for _ in range(self.cfg.k):
            logits = self.draft.step(cur, kv)
            cur = torch.cat([cur, logits.argmax(-1, keepdim=True)])
            toks.append(cur[-1])
        self.pool.recycle(kv)
        return torch.stack(toks)

    def propose_greedy(self, ids: torch.Tensor, eos: int) -> torch.Tensor:
        kv = self.pool.obtain()  # clean: near miss, break falls through to recycle
        cur = ids
        for _ in range(self.cfg.k):
            nxt = self.draft.step(cur, kv).argmax(-1, keepdim=True)
            cur = torch.cat([cur, nxt])
            if int(nxt) == eos:
                break
        self.pool.recycle(kv)
        return cur[len(ids):]

    def expand(self, ids: torch.Tensor, width: int) -> List[Branch]:
        logits = self.draft.step(ids, torch.zeros(1))
        top = logits.topk(width)
        return [Branch(torch.cat([ids, t.view(1)]), self.pool.obtain(), float(s)) for s, t in zip(top.values, top.indices)]  # clean: carried out in the branches

    def best_branch(self, ids: torch.Tensor, width: int) -> torch.Tensor:
        branches = self.expand(ids, width)  # leak: only the winner's kv is recycled
        best = max(branches, key=lambda b: b.score)
        tokens = best.tokens
        self.pool.recycle(best.kv)
        return tokens

    def tree_search(self, ids: torch.Tensor, width: int) -> Tuple[torch.Tensor, float]:
        branches = self.expand(ids, width)  # clean: near miss, losers and winner are both recycled
        branches.sort(key=lambda b: b.score, reverse=True)
        best, rest = branches[0], branches[1:]
        for b in rest:
            self.pool.recycle(b.kv)
        for _ in range(self.cfg.k):
            logits = self.draft.step(best.tokens, best.kv)
            best.tokens = torch.cat([best.tokens, logits.argmax(-1, keepdim=True)])
            best.score += float(logits.max())
        self.pool.recycle(best.kv)
        return best.tokens, best.score

    def verify(self, ids: torch.Tensor, proposal: torch.Tensor) -> int:
        kv = self.pool.obtain()  # clean: both branches recycle
        self.proposed += len(proposal)
        if self.cfg.typical:
            probs = self.target.verify(torch.cat([ids, proposal]), kv).softmax(-1)
            n = int((probs.gather(-1, proposal[:, None]) > 0.1).long().cumprod(0).sum())
            self.pool.recycle(kv)
        else:
            picks = self.target.verify(torch.cat([ids, proposal]), kv).argmax(-1)
            self.pool.recycle(kv)
            n = int((picks == proposal).long().cumprod(0).sum())
        self.accepted += n
        return n

    def calibrate(self, prompts: List[torch.Tensor]) -> float:
        scores = []
        for p in prompts:
            kv = self.pool.obtain()  # leak: prompts with non-finite logits continue without recycling
            logits = self.draft.step(p, kv)
            if not torch.isfinite(logits).all():
                logger.warning("non-finite draft logits, prompt ignored")
                continue
            scores.append(float(logits.max()))
            self.pool.recycle(kv)
        return sum(scores) / max(1, len(scores))
