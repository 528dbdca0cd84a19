"""Scratch tensors for attention and sampling kernels."""
from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import torch


class WorkspaceArena:
    """Recycles scratch tensors by size class."""

    def __init__(self) -> None:
        self._shelves: Dict[int, List[torch.Tensor]] = {}
        self.outstanding = 0

    @staticmethod
    def _bucket(numel: int) -> int:
        size = 256
        while size < numel:
            size *= 2
        return size

    def borrow(self, numel: int) -> torch.Tensor:
        size = self._bucket(numel)
        shelf = self._shelves.setdefault(size, [])
        self.outstanding += 1
        if shelf:
            return shelf.pop()  # clean: lent to the caller
        return torch.empty(size)

    def hand_back(self, t: torch.Tensor) -> None:
        self.outstanding -= 1
        self._shelves.setdefault(t.numel(), []).append(t)

    def borrow_zeroed(self, numel: int) -> torch.Tensor:
        ws = self.borrow(numel)  # clean: passed on to the caller
        ws.zero_()
        return ws


class AttentionOp:
    def __init__(self, arena: WorkspaceArena, heads: int, dim: int):
        self.arena = arena
        self.heads = heads
        self.dim = dim
        self._lse: Optional[torch.Tensor] = None

    def _partials(self, q: torch.Tensor, splits: int) -> torch.Tensor:
        buf = self.arena.borrow(q.shape[0] * self.heads * splits)  # clean: returned, the callers hand it back
        buf.fill_(float("-inf"))
        return buf

    def _scores(self, q: torch.Tensor) -> torch.Tensor:
        """Row sums as a fresh tensor."""
        buf = self.arena.borrow_zeroed(q.shape[0])  # clean: near miss, a clone is returned and the scratch handed back
        buf[: q.shape[0]] += q.sum(-1)
        out = buf[: q.shape[0]].clone()
        self.arena.hand_back(buf)
        return out

    def combine(self, q: torch.Tensor, splits: int) -> torch.Tensor:
        part = self._partials(q, splits).clone()  # leak: only the clone survives, the borrowed tensor is dropped
        return part.view(-1)[: q.shape[0]]

    def combine_into(self, q: torch.Tensor, out: torch.Tensor, splits: int) -> None:
        part = self._partials(q, splits)  # clean: handed back after the copy
        out.copy_(part[: out.numel()].view_as(out))
        self.arena.hand_back(part)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        row = self._scores(q)
        ws = self.arena.borrow(q.numel())  # leak: the early return for an empty batch keeps it
        if q.shape[0] == 0:
            return q
        ws[: q.numel()].copy_(q.flatten())
        out = ws[: q.numel()].view_as(q) * row.unsqueeze(-1)
        self.arena.hand_back(ws)
        return out

    def prepare_lse(self, n: int) -> torch.Tensor:
        if self._lse is not None and self._lse.numel() < n:
            self.arena.hand_back(self._lse)
            self._lse = None
        if self._lse is None:
            self._lse = self.arena.borrow(n)  # clean: near miss, the field is empty here and reset hands it back
        return self._lse

    def reset(self) -> None:
        if self._lse is not None:
            self.arena.hand_back(self._lse)
            self._lse = None


class Sampler:
    def __init__(self, arena: WorkspaceArena):
        self.arena = arena

    def topk(self, logits: torch.Tensor, k: int) -> Tuple[torch.Tensor, torch.Tensor]:
        ws = self.arena.borrow(logits.numel())  # clean: near miss, each of the two returns comes after a hand_back
        ws[: logits.numel()].copy_(logits)
        if k <= 0:
            self.arena.hand_back(ws)
            return logits, torch.arange(logits.numel())
        vals, idx = torch.topk(ws[: logits.numel()], min(k, logits.numel()))
        self.arena.hand_back(ws)
        return vals, idx

    def cumulative(self, probs: torch.Tensor, passes: int) -> torch.Tensor:
        acc = self.arena.borrow_zeroed(probs.numel())  # leak: rebound to nxt in the loop, the first tensor is not handed back
        acc[: probs.numel()].copy_(probs)
        for _ in range(passes):
            nxt = self.arena.borrow(probs.numel())  # leak: becomes acc, which the next pass rebinds without handing it back
            torch.cumsum(acc[: probs.numel()], 0, out=nxt[: probs.numel()])
            acc = nxt
        out = acc[: probs.numel()].clone()
        self.arena.hand_back(acc)
        return out

    def smooth(self, probs: torch.Tensor, passes: int) -> torch.Tensor:
        n = probs.numel()
        cur = self.arena.borrow(n)  # clean: near miss, rebound only after the former tensor went back
        cur[:n].copy_(probs)
        for _ in range(passes):
            nxt = self.arena.borrow(n)  # clean: near miss, lives on as cur and is handed back as such
            nxt[:n].copy_(cur[:n].roll(1) * 0.5 + cur[:n] * 0.5)
            self.arena.hand_back(cur)
            cur = nxt
        out = cur[:n].clone()
        self.arena.hand_back(cur)
        return out

    def greedy(self, logits: torch.Tensor) -> int:
        ws = self.arena.borrow(logits.numel())  # leak: falls off the end without hand_back
        ws[: logits.numel()].copy_(logits)
        return int(ws[: logits.numel()].argmax())
