"""Speculative decoding: draft proposals and target verification over lent scratch tensors."""
from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any, Dict, List, Optional, Tuple

try:
    import torch
except ImportError:  # cpu-only tooling
    torch = None


def _empty(shape: Tuple[int, ...]) -> Any:
    if torch is not None:
        return torch.empty(shape)
    return {"shape": shape, "data": [0.0] * 8}


class ScratchLender:
    """Tensors grouped by shape; a lent tensor has to come back through `give_back`."""

    def __init__(self, per_shape: int = 16) -> None:
        self._lock = threading.Lock()
        self._idle: Dict[Tuple[int, ...], List[Any]] = defaultdict(list)
        self._lent: Dict[int, Tuple[int, ...]] = {}
        self._per_shape = per_shape

    def lend(self, *shape: int) -> Any:
        with self._lock:
            idle = self._idle[shape]
            t = idle.pop() if idle else _empty(shape)
            self._lent[id(t)] = shape
            return t

    def give_back(self, t: Any) -> None:
        with self._lock:
            shape = self._lent.pop(id(t))
            if len(self._idle[shape]) < self._per_shape:
                self._idle[shape].append(t)

    @property
    def outstanding(self) -> int:
        return len(self._lent)


class DraftModel:
    def __init__(self, lender: ScratchLender, model: Any, vocab: int) -> None:
        self.lender = lender
        self.model = model
        self.vocab = vocab

    def logits(self, tokens: List[int]) -> Any:
        """The caller gives the result back."""
        out = self.lender.lend(1, self.vocab)  # clean: returned to the caller
        self.model.forward(tokens, out=out)
        return out

    def snapshot_probs(self, tokens: List[int]) -> Any:
        probs = self.logits(tokens).clone()  # leak: lent row is copied and dropped
        return probs

    def propose(self, tokens: List[int], k: int) -> List[int]:
        ctx = list(tokens)
        out: List[int] = []
        for _ in range(k):
            row = self.logits(ctx)  # leak: break on eos leaves the row lent
            tok = self.model.argmax(row)
            if tok == self.model.eos:
                break
            self.lender.give_back(row)
            ctx.append(tok)
            out.append(tok)
        return out

    def propose_tree(self, tokens: List[int], width: int, depth: int) -> List[List[int]]:
        frontier = [list(tokens)]
        for _ in range(depth):
            nxt: List[List[int]] = []
            for path in frontier:
                row = self.logits(path)  # clean: near miss, topk is a copy and the row is given back before the continue
                best = self.model.topk(row, width)
                self.lender.give_back(row)
                if not best:
                    continue
                nxt.extend(path + [t] for t in best)
            frontier = nxt
        return frontier


class Verifier:
    def __init__(self, lender: ScratchLender, target: Any, hidden: int, vocab: int) -> None:
        self.lender = lender
        self.target = target
        self.hidden = hidden
        self.vocab = vocab
        self._residual: Optional[Any] = None
        self._mask: Optional[Any] = None

    def verify(self, draft: List[int], ctx: List[int]) -> int:
        hid = self.lender.lend(len(draft) + 1, self.hidden)  # clean: given back in the finally
        logits = None
        try:
            self.target.forward(ctx + draft, out=hid)
            if not draft:
                return 0
            logits = self.lender.lend(len(draft) + 1, self.vocab)  # clean: near miss, finally tests for None
            self.target.head(hid, out=logits)
            return self.target.accept(logits, draft)
        finally:
            self.lender.give_back(hid)
            if logits is not None:
                self.lender.give_back(logits)

    def verify_greedy(self, draft: List[int], ctx: List[int]) -> int:
        hid = self.lender.lend(len(draft) + 1, self.hidden)  # clean: near miss, replaced only after it went back
        self.target.forward(ctx + draft, out=hid)
        if self.target.needs_norm:
            normed = self.lender.lend(len(draft) + 1, self.hidden)  # clean: becomes hid, given back at the end
            self.target.norm(hid, out=normed)
            self.lender.give_back(hid)
            hid = normed
        n = self.target.accept(hid, draft)
        self.lender.give_back(hid)
        return n

    def verify_scaled(self, draft: List[int], ctx: List[int], temperature: float) -> int:
        x = self.lender.lend(len(draft) + 1, self.vocab)  # leak: x is rebound to the scaled tensor, the first one (raw) never goes back
        self.target.forward(ctx + draft, out=x)
        if temperature != 1.0:
            raw = x
            x = self.lender.lend(len(draft) + 1, self.vocab)  # clean: the surviving binding is given back
            self.target.scale(raw, temperature, out=x)
        n = self.target.accept(x, draft)
        self.lender.give_back(x)
        return n

    def set_residual(self, rows: int) -> None:
        self._residual = self.lender.lend(rows, self.vocab)  # leak: a second call overwrites the held residual

    def set_mask(self, rows: int) -> None:
        if self._mask is not None:
            self.lender.give_back(self._mask)
        self._mask = self.lender.lend(rows, self.vocab)  # clean: near miss, previous one given back first

    def close(self) -> None:
        for t in (self._residual, self._mask):
            if t is not None:
                self.lender.give_back(t)
        self._residual = self._mask = None


class SpecWorker:
    def __init__(self, draft: DraftModel, verifier: Verifier, lender: ScratchLender) -> None:
        self.draft = draft
        self.verifier = verifier
        self.lender = lender
        self.failures = 0

    def step(self, ctx: List[int], k: int) -> List[int]:
        proposal = self.draft.propose(ctx, k)
        n = self.verifier.verify(proposal, ctx)
        return proposal[:n]

    def bonus_token(self, ctx: List[int]) -> Optional[int]:
        row = self.draft.logits(ctx)  # leak: sampling error is caught and the row forgotten
        try:
            tok = self.draft.model.sample(row)
            self.lender.give_back(row)
            return tok
        except ArithmeticError:
            self.failures += 1
            return None
