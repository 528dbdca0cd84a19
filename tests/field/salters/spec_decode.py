"""Speculative decoding: proposers, verification and the arenas that hold draft logits."""
from __future__ import annotations

import abc
import random
from dataclasses import dataclass, field
from typing import List, NamedTuple, Optional, Sequence

import torch


class DraftArena:
    """Preallocated [k, vocab] tensors; lend() and recall() are called from the step thread only."""

    def __init__(self, count: int, k: int, vocab: int, device: str = "cuda") -> None:
        self._stack = [torch.empty(k, vocab, device=device) for _ in range(count)]
        self.lent = 0

    def lend(self) -> Optional[torch.Tensor]:
        if not self._stack:
            return None
        self.lent += 1
        return self._stack.pop()

    def recall(self, tensor: torch.Tensor) -> None:
        self.lent -= 1
        self._stack.append(tensor)


class KvScratch:
    def __init__(self, pages: int) -> None:
        self._pages = list(range(pages))

    def reserve(self, n: int) -> List[int]:
        """Up to n pages, fewer when there are not so many."""
        got, self._pages = self._pages[:n], self._pages[n:]
        return got

    def unreserve(self, pages: Sequence[int]) -> None:
        self._pages.extend(pages)


class Proposal(NamedTuple):
    tokens: List[int]
    logits: Optional[torch.Tensor]
    pages: List[int]


@dataclass
class SpecRequest:
    rid: str
    context: List[int]
    k: int = 4
    accepted: List[int] = field(default_factory=list)
    greedy: bool = True
    done: bool = False


class Proposer(abc.ABC):
    def __init__(self, arena: DraftArena, scratch: KvScratch) -> None:
        self.arena = arena
        self.scratch = scratch

    @abc.abstractmethod
    def propose(self, req: SpecRequest) -> Optional[Proposal]: ...

    def discard(self, proposal: Proposal) -> None:
        if proposal.logits is not None:
            self.arena.recall(proposal.logits)
        self.scratch.unreserve(proposal.pages)


class NgramProposer(Proposer):
    """Looks the last bigram up in the context; needs no logits."""

    def propose(self, req: SpecRequest) -> Optional[Proposal]:
        pages = self.scratch.reserve(req.k)  # leak: a bigram that does not match returns without the pages
        tail = tuple(req.context[-2:])
        for i in range(len(req.context) - 3, -1, -1):
            if tuple(req.context[i:i + 2]) == tail:
                follow = req.context[i + 2:i + 2 + len(pages)]
                return Proposal(follow, None, pages)
        return None


class ModelProposer(Proposer):
    def __init__(self, arena: DraftArena, scratch: KvScratch, model) -> None:
        super().__init__(arena, scratch)
        self.model = model

    def propose(self, req: SpecRequest) -> Optional[Proposal]:
        logits = self.arena.lend()  # clean: near miss, recalled when there are no pages, else in the proposal
        if logits is None:
            return None
        pages = self.scratch.reserve(req.k)  # clean: an empty reservation or a part of the proposal
        if not pages:
            self.arena.recall(logits)
            return None
        tokens = []
        for i in range(len(pages)):
            logits[i].copy_(self.model(req.context + tokens))
            tokens.append(int(logits[i].argmax()))
        return Proposal(tokens, logits, pages)


class TreeProposer(Proposer):
    def __init__(self, arena: DraftArena, scratch: KvScratch, model, width: int) -> None:
        super().__init__(arena, scratch)
        self.model = model
        self.width = width

    def _branch(self, req: SpecRequest, seed: int) -> Optional[Proposal]:
        logits = self.arena.lend()  # clean: goes out in the proposal
        if logits is None:
            return None
        logits.copy_(self.model(req.context + [seed]))
        return Proposal([seed], logits, [])

    def propose(self, req: SpecRequest) -> Optional[Proposal]:
        best: Optional[Proposal] = None
        best_score = float("-inf")
        for seed in range(self.width):
            cand = self._branch(req, seed)  # leak: neither the beaten nor the replaced candidate is discarded
            if cand is None:
                break
            score = float(cand.logits.max())
            if score > best_score:
                best, best_score = cand, score
        return best


class PairProposer(TreeProposer):
    def propose(self, req: SpecRequest) -> Optional[Proposal]:
        left = self._branch(req, 0)  # clean: returned, or discarded as the lower one
        if left is None:
            return None
        right = self._branch(req, 1)  # clean: near miss, one of the two is discarded and one returned
        if right is None:
            return left
        if float(left.logits.max()) < float(right.logits.max()):
            left, right = right, left
        self.discard(right)
        return left


class Verifier:
    def __init__(self, arena: DraftArena, target) -> None:
        self.arena = arena
        self.target = target

    def target_logits(self, req: SpecRequest, tokens: List[int]) -> Optional[torch.Tensor]:
        """The caller recalls the tensor."""
        out = self.arena.lend()  # clean: handed to the caller
        if out is None:
            return None
        out[:len(tokens)].copy_(self.target(req.context, tokens))
        return out

    def target_probs(self, req: SpecRequest, tokens: List[int]) -> Optional[torch.Tensor]:
        out = self.target_logits(req, tokens)  # leak: softmax makes a new tensor, the pooled one is dropped
        if out is None:
            return None
        return torch.softmax(out[:len(tokens)], dim=-1)

    def target_argmax(self, req: SpecRequest, tokens: List[int]) -> List[int]:
        out = self.target_logits(req, tokens)  # clean: recalled after the copy to a list
        if out is None:
            return []
        picks = out[:len(tokens)].argmax(dim=-1).tolist()
        self.arena.recall(out)
        return picks

    def accept_greedy(self, req: SpecRequest, proposal: Proposal) -> int:
        picks = self.target_argmax(req, proposal.tokens)
        n = 0
        for want, got in zip(picks, proposal.tokens):
            if want != got:
                break
            n += 1
        req.accepted.extend(proposal.tokens[:n])
        return n

    def accept_sampled(self, req: SpecRequest, proposal: Proposal, rng: random.Random) -> int:
        target = self.target_logits(req, proposal.tokens)  # leak: the first rejection returns without recall
        if target is None or proposal.logits is None:
            return 0
        for i, tok in enumerate(proposal.tokens):
            ratio = float(target[i, tok] - proposal.logits[i, tok])
            if rng.random() > ratio:
                req.accepted.extend(proposal.tokens[:i])
                return i
        req.accepted.extend(proposal.tokens)
        self.arena.recall(target)
        return len(proposal.tokens)


class SpecEngine:
    def __init__(self, proposer: Proposer, verifier: Verifier, seed: int = 0) -> None:
        self.proposer = proposer
        self.verifier = verifier
        self.rng = random.Random(seed)
        self._ahead: dict[str, Proposal] = {}

    def step(self, batch: List[SpecRequest]) -> int:
        total = 0
        for req in batch:
            proposal = self.proposer.propose(req)  # clean: near miss, both branches fall to discard()
            if proposal is None:
                continue
            if req.greedy:
                total += self.verifier.accept_greedy(req, proposal)
            else:
                total += self.verifier.accept_sampled(req, proposal, self.rng)
            self.proposer.discard(proposal)
        return total

    def step_eager(self, batch: List[SpecRequest], limit: int) -> int:
        total = 0
        for req in batch:
            proposal = self.proposer.propose(req)  # leak: the break on the limit comes before discard()
            if proposal is None:
                continue
            total += self.verifier.accept_greedy(req, proposal)
            if total >= limit:
                break
            self.proposer.discard(proposal)
        return total

    def prefetch(self, batch: List[SpecRequest]) -> None:
        for req in batch:
            if req.rid in self._ahead or req.done:
                continue
            proposal = self.proposer.propose(req)  # clean: filed, consume() and drop() discard it
            if proposal is not None:
                self._ahead[req.rid] = proposal

    def consume(self, req: SpecRequest) -> int:
        proposal = self._ahead.pop(req.rid, None)
        if proposal is None:
            return 0
        try:
            return self.verifier.accept_greedy(req, proposal)
        finally:
            self.proposer.discard(proposal)

    def drop(self, rid: str) -> None:
        proposal = self._ahead.pop(rid, None)
        if proposal is not None:
            self.proposer.discard(proposal)
