"""Speculative decoding with pooled logits: draft, verify, and the tree variant."""
from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor


class ScratchShelf:
    """Tensors kept by shape and dtype between steps."""

    def __init__(self, device: str = "cuda", cap: int = 8) -> None:
        self.device = device
        self.cap = cap
        self._idle: dict[tuple, list[Tensor]] = defaultdict(list)
        self.lent = 0

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        shelf = self._idle[(tuple(shape), dtype)]
        if shelf:
            t = shelf.pop()  # clean: handed to the caller
        else:
            t = torch.empty(shape, dtype=dtype, device=self.device)
        self.lent += 1
        return t

    def borrow_like(self, other: Tensor) -> Tensor:
        return self.borrow(tuple(other.shape), other.dtype)  # clean: handed to the caller

    def give(self, t: Tensor) -> None:
        self.lent -= 1
        shelf = self._idle[(tuple(t.shape), t.dtype)]
        if len(shelf) < self.cap:
            shelf.append(t)

    @contextlib.contextmanager
    def using(self, *shape: int) -> Iterator[Tensor]:
        t = self.borrow(shape)  # clean: given back in finally
        try:
            yield t
        finally:
            self.give(t)


@dataclass
class DraftTree:
    parents: list[int]
    width: int


class DraftRunner:
    def __init__(self, model: torch.nn.Module, vocab: int, shelf: ScratchShelf) -> None:
        self.model = model
        self.vocab = vocab
        self.shelf = shelf

    def propose(self, hidden: Tensor, k: int) -> Tensor:
        """Logits of k draft steps. The caller gives them back to the shelf."""
        logits = self.shelf.borrow((k, hidden.shape[0], self.vocab))  # clean: returned to the caller
        for i in range(k):
            hidden, step = self.model(hidden)
            logits[i].copy_(step)
        return logits

    def greedy(self, hidden: Tensor) -> Tensor:
        logits = self.propose(hidden, 1)  # leak: the choice is copied out and the pooled logits dropped
        return logits[0].argmax(-1).clone()

    def confidence(self, hidden: Tensor, k: int) -> list[float]:
        probs = self.propose(hidden, k).softmax(-1)  # leak: softmax makes a new tensor and the pooled one has no name
        return probs.amax(-1).mean(-1).tolist()

    def entropy(self, hidden: Tensor, floor: float) -> float:
        logits = self.propose(hidden, 1)  # leak: not given back when the peak is under the floor
        peak = float(logits.max())
        if peak < floor:
            return float("inf")
        logp = logits.log_softmax(-1)
        self.shelf.give(logits)
        return float(-(logp.exp() * logp).sum(-1).mean())


class Verifier:
    def __init__(self, target: torch.nn.Module, shelf: ScratchShelf, vocab: int) -> None:
        self.target = target
        self.shelf = shelf
        self.vocab = vocab
        self._carry: Tensor | None = None

    def target_logits(self, tokens: Tensor) -> Tensor:
        out = self.shelf.borrow((tokens.shape[0], tokens.shape[1], self.vocab))  # clean: returned to the caller
        out.copy_(self.target(tokens))
        return out

    def accept(self, draft: Tensor, tokens: Tensor) -> list[int]:
        tgt = self.target_logits(tokens)  # clean: given back in finally
        try:
            same = tgt.argmax(-1) == draft.argmax(-1)
            return same.int().cumprod(-1).sum(-1).tolist()
        finally:
            self.shelf.give(tgt)

    def ratio(self, draft: Tensor, target: Tensor) -> Tensor:
        buf = self.shelf.borrow_like(draft)  # leak: ValueError for mismatched shapes leaves buf out
        if draft.shape != target.shape:
            raise ValueError(f"{tuple(draft.shape)} vs {tuple(target.shape)}")
        torch.div(target, draft, out=buf)
        res = buf.clamp(max=1.0)
        self.shelf.give(buf)
        return res

    def smooth(self, x: Tensor, rounds: int) -> None:
        cur = self.shelf.borrow_like(x)  # clean: near miss, the two trade places and both go back
        nxt = self.shelf.borrow_like(x)  # clean: near miss, the two trade places and both go back
        cur.copy_(x)
        for _ in range(rounds):
            torch.softmax(cur, -1, out=nxt)
            cur, nxt = nxt, cur
        x.copy_(cur)
        self.shelf.give(cur)
        self.shelf.give(nxt)

    def tree_scores(self, tree: DraftTree, rows: int) -> list[float]:
        buf = self.shelf.borrow((rows, self.vocab))  # leak: rebound with a wider one for wide trees
        if tree.width > rows:
            buf = self.shelf.borrow((tree.width, self.vocab))  # clean: given back at the end
        buf.zero_()
        for i, p in enumerate(tree.parents):
            buf[i % buf.shape[0]].add_(p)
        scores = buf.sum(-1).tolist()
        self.shelf.give(buf)
        return scores

    def tree_mask(self, tree: DraftTree, rows: int) -> Tensor:
        buf = self.shelf.borrow((rows, rows))  # clean: near miss, given back before the name is bound again
        if tree.width > rows:
            self.shelf.give(buf)
            buf = self.shelf.borrow((tree.width, tree.width))  # clean: given back after the copy
        buf.fill_(float("-inf"))
        for i, p in enumerate(tree.parents[:buf.shape[0]]):
            buf[i, p] = 0.0
        mask = buf.clone()
        self.shelf.give(buf)
        return mask

    def step(self, tokens: Tensor, bonus: bool) -> Tensor:
        """Keeps the last logits for the bonus token of the next step."""
        prev, self._carry = self._carry, None
        logits = self.target_logits(tokens)  # clean: near miss, kept in self._carry or given back by the same flag
        picks = logits.argmax(-1)
        if prev is not None:
            self.shelf.give(prev)
        if bonus:
            self._carry = logits
        if not bonus:
            self.shelf.give(logits)
        return picks

    def reset(self) -> None:
        if self._carry is not None:
            self.shelf.give(self._carry)
            self._carry = None


def resample(shelf: ScratchShelf, draft: Tensor, target: Tensor) -> Tensor:
    with shelf.using(*draft.shape) as diff:  # clean: the context manager gives it back
        torch.sub(target, draft, out=diff)
        diff.clamp_(min=0.0)
        return torch.multinomial(diff.flatten(0, -2), 1)


def calibrate(runner: DraftRunner, samples: list[Tensor], limit: float) -> int:
    good = 0
    for hidden in samples:
        logits = runner.propose(hidden, 1)  # leak: continue for non-finite logits skips give
        if not torch.isfinite(logits).all():
            continue
        if float(logits.max()) > limit:
            good += 1
        runner.shelf.give(logits)
    return good
