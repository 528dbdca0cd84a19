"""Speculative decoding: draft/verify scratch from a tensor pool, generators over accepted tokens."""
from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Callable, Dict, Generator, Iterator, List, Optional, Sequence, Tuple

import numpy as np

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)


class DraftAborted(Exception):
    pass


class ScratchPool:
    """Tensors by shape; rent() makes one when the shelf is empty, up to a budget of elements."""

    def __init__(self, budget: int = 1 << 22) -> None:
        self._shelf: Dict[Tuple[int, ...], List[np.ndarray]] = {}
        self.budget = budget
        self.rented = 0

    def rent(self, *shape: int) -> np.ndarray:
        shelf = self._shelf.setdefault(shape, [])
        t = shelf.pop() if shelf else np.zeros(shape, dtype=np.float32)
        self.rented += t.size
        if self.rented > self.budget:
            self.rented -= t.size
            shelf.append(t)
            raise MemoryError(f"scratch budget {self.budget} exceeded")
        return t

    def give(self, t: np.ndarray) -> None:
        self.rented -= t.size
        self._shelf[t.shape].append(t)

    @contextmanager
    def renting(self, *shape: int) -> Iterator[np.ndarray]:
        t = self.rent(*shape)  # clean: finally
        try:
            yield t
        finally:
            self.give(t)


LogitsFn = Callable[[Sequence[int]], np.ndarray]


@dataclass
class Proposal:
    tokens: List[int]
    probs: np.ndarray


class DraftModel:
    def __init__(self, fn: LogitsFn, vocab: int, pool: ScratchPool) -> None:
        self.fn = fn
        self.vocab = vocab
        self.pool = pool

    def propose(self, ctx: List[int], k: int) -> Proposal:
        """`probs` of the proposal is pool memory, given by the verifier."""
        probs = self.pool.rent(k, self.vocab)  # clean: leaves with the Proposal
        tokens: List[int] = []
        for i in range(k):
            probs[i] = self.fn(ctx + tokens)
            tokens.append(int(probs[i].argmax()))
        return Proposal(tokens, probs)

    def propose_adaptive(self, ctx: List[int], k: int, floor: float) -> Optional[Proposal]:
        probs = self.pool.rent(k, self.vocab)  # leak: a first token under the floor gives None and keeps the tensor
        tokens: List[int] = []
        for i in range(k):
            probs[i] = self.fn(ctx + tokens)
            if probs[i].max() < floor:
                if not tokens:
                    return None
                break
            tokens.append(int(probs[i].argmax()))
        return Proposal(tokens, probs)

    def best_token(self, ctx: List[int]) -> int:
        return self.propose(ctx, 1).tokens[0]  # leak: the proposal's tensor is dropped with the proposal


class Verifier:
    def __init__(self, fn: LogitsFn, vocab: int, pool: ScratchPool) -> None:
        self.fn = fn
        self.vocab = vocab
        self.pool = pool
        self.accepted = 0
        self.drafted = 0

    def target_probs(self, ctx: List[int], tokens: List[int]) -> np.ndarray:
        out = self.pool.rent(len(tokens) + 1, self.vocab)  # clean: returned to the caller
        for i in range(len(tokens) + 1):
            out[i] = self.fn(ctx + tokens[:i])
        return out

    def verify(self, ctx: List[int], prop: Proposal) -> List[int]:
        """Consumes the proposal."""
        target = self.target_probs(ctx, prop.tokens)  # clean: near miss, both exits of the loop reach the give
        out: List[int] = []
        for i, tok in enumerate(prop.tokens):
            want = int(target[i].argmax())
            out.append(want)
            if want != tok:
                break
        else:
            out.append(int(target[-1].argmax()))
        self.accepted += len(out) - 1
        self.drafted += len(prop.tokens)
        self.pool.give(target)
        self.pool.give(prop.probs)
        return out

    def verify_strict(self, ctx: List[int], prop: Proposal) -> List[int]:
        target = self.target_probs(ctx, prop.tokens)  # leak: the first mismatch returns with only the proposal given back
        out: List[int] = []
        for i, tok in enumerate(prop.tokens):
            if int(target[i].argmax()) != tok:
                self.pool.give(prop.probs)
                return out
            out.append(tok)
        self.pool.give(target)
        self.pool.give(prop.probs)
        return out

    def verify_tree(self, ctx: List[int], branches: List[Proposal]) -> List[int]:
        best: List[int] = []
        for prop in branches:
            with self.pool.renting(len(prop.tokens), self.vocab) as diff:  # clean: with
                diff[...] = prop.probs[: len(prop.tokens)]
                if diff.max() <= 0:
                    self.pool.give(prop.probs)
                    continue
            cand = self.verify(ctx, prop)
            if len(cand) > len(best):
                best = cand
        return best

    def rescore(self, ctx: List[int], tokens: List[int]) -> float:
        target = self.target_probs(ctx, tokens)  # leak: rebound to its softmax, the pool's tensor is no longer reachable
        target = np.exp(target) / np.exp(target).sum(-1, keepdims=True)
        return float(target[:-1].max(-1).sum())

    def rescore_inplace(self, ctx: List[int], tokens: List[int]) -> float:
        target = self.target_probs(ctx, tokens)  # clean: near miss, views and in-place work do not rebind it
        np.exp(target, out=target)
        target /= target.sum(-1, keepdims=True)
        view = target[:-1]
        score = float(view.max(-1).sum())
        self.pool.give(target)
        return score


def decode(draft: DraftModel, ver: Verifier, prompt: List[int], k: int, limit: int) -> Generator[int, None, None]:
    ctx = list(prompt)
    while len(ctx) - len(prompt) < limit:
        prop = draft.propose(ctx, k)  # clean: near miss, verify consumes it
        new = ver.verify(ctx, prop)
        ctx += new
        yield from new


def decode_with_eos(draft: DraftModel, ver: Verifier, prompt: List[int], k: int, eos: int) -> Iterator[int]:
    ctx = list(prompt)
    while True:
        prop = draft.propose(ctx, k)  # leak: an eos in the draft returns before the proposal is verified or given back
        if eos in prop.tokens:
            yield from prop.tokens[: prop.tokens.index(eos)]
            return
        new = ver.verify(ctx, prop)
        yield from new
        ctx += new


def decode_adaptive(draft: DraftModel, ver: Verifier, prompt: List[int], k: int, limit: int) -> List[int]:
    ctx = list(prompt)
    for _ in range(limit):
        prop = draft.propose_adaptive(ctx, k, floor=0.1)  # clean: near miss, None has nothing; otherwise consumed
        if prop is None:
            ctx.append(draft.best_token(ctx))
            continue
        ctx += ver.verify(ctx, prop)
    return ctx[len(prompt) :]


def decode_tree(draft: DraftModel, ver: Verifier, prompt: List[int], width: int) -> List[int]:
    branches = [draft.propose(prompt, w + 1) for w in range(width)]  # clean: near miss, verify_tree consumes each of them
    return ver.verify_tree(prompt, branches)


def decode_lookahead(draft: DraftModel, ver: Verifier, prompt: List[int], k: int, rounds: int) -> List[int]:
    """Drafts the next round while the current one is verified."""
    ctx = list(prompt)
    ahead = draft.propose(ctx, k)  # clean: near miss, consumed by the first verify or given after the loop
    for _ in range(rounds):
        cur = ahead
        guess = ctx + cur.tokens
        ahead = draft.propose(guess, k)  # leak: a wrong guess rebinds it with a fresh proposal
        ctx += ver.verify(ctx, cur)
        if ctx[: len(guess)] != guess:
            ahead = draft.propose(ctx, k)  # clean: consumed in the next round or given after the loop
    ver.pool.give(ahead.probs)
    return ctx[len(prompt) :]


def compare_drafts(drafts: List[DraftModel], ctx: List[int], k: int) -> int:
    """Which draft agrees with the first one for longest."""
    with ExitStack() as stack:
        props = []
        for d in drafts:
            p = d.propose(ctx, k)  # clean: near miss, the exit stack gives it
            stack.callback(d.pool.give, p.probs)
            props.append(p)
        base = props[0].tokens
        agree = [sum(a == b for a, b in zip(base, p.tokens)) for p in props[1:]]
        return 1 + agree.index(max(agree)) if agree else 0


def smoke(draft: DraftModel, ctx: List[int]) -> Optional[float]:
    bias = draft.pool.rent(draft.vocab)  # leak: an aborted draft is logged and survived with the bias still rented
    try:
        bias[:] = draft.fn(ctx)
        if not np.isfinite(bias).all():
            raise DraftAborted("nan in draft logits")
        top = float(bias.max())
        draft.pool.give(bias)
        return top
    except DraftAborted as exc:
        logger.warning("%s", exc)
        return None
