from __future__ import annotations

import typing
from dataclasses import dataclass, field

import torch


class DraftKVPool:
    def __init__(self, pages: int):
        self.free_pages = set(range(pages))
        self.high_water = 0

    def reserve(self, n: int) -> list[int]:
        if n > len(self.free_pages):
            raise MemoryError(f"wanted {n} pages, {len(self.free_pages)} left")
        got = [self.free_pages.pop() for _ in range(n)]
        self.high_water = max(self.high_water, n)
        return got

    def unreserve(self, pages: typing.Iterable[int]) -> None:
        self.free_pages.update(pages)


class LogitsPool:
    def __init__(self, vocab: int, depth: int = 4):
        self.vocab = vocab
        self.stack = [torch.empty(vocab) for _ in range(depth)]

    def rent_logits(self) -> torch.Tensor:
        return self.stack.pop() if self.stack else torch.empty(self.vocab)

    def hand_back(self, t: torch.Tensor) -> None:
        self.stack.append(t)


@dataclass
class Proposal:
    tokens: list[int]
    pages: list[int] = field(default_factory=list)


class NgramProposer:
    def __init__(self, n: int, k: int):
        self.n, self.k = n, k

    def lookup(self, ctx: list[int]) -> list[int]:
        key = ctx[-self.n :]
        for i in range(len(ctx) - self.n - 1, -1, -1):
            if ctx[i : i + self.n] == key:
                return ctx[i + self.n : i + self.n + self.k]
        return []


class SpecDecoder:
    def __init__(self, kv: DraftKVPool, logits: LogitsPool, proposer: NgramProposer):
        self.kv = kv
        self.logits = logits
        self.proposer = proposer
        self.open_proposals: list[Proposal] = []

    def propose(self, ctx: list[int]) -> Proposal | None:
        pages = self.kv.reserve(self.proposer.k)  # leak: an empty lookup returns without the pages
        toks = self.proposer.lookup(ctx)
        if not toks:
            return None
        return Proposal(toks, pages)

    def propose_lazy(self, ctx: list[int]) -> Proposal | None:
        toks = self.proposer.lookup(ctx)
        if not toks:
            return None
        return Proposal(toks, self.kv.reserve(len(toks)))  # clean: handed to the caller inside the proposal

    def step(self, ctx: list[int], target: typing.Callable[[list[int]], list[int]]) -> list[int]:
        prop = self.propose_lazy(ctx)  # clean: its pages are unreserved after the check
        if prop is None:
            return target(ctx)
        want = target(ctx + prop.tokens)
        n_ok = 0
        for a, b in zip(prop.tokens, want):
            if a != b:
                break
            n_ok += 1
        self.kv.unreserve(prop.pages)
        return want[: n_ok + 1]

    def step_keep(self, ctx: list[int], want: list[int]) -> list[int]:
        prop = self.propose_lazy(ctx)  # leak: only the pages of refused tokens go back, the rest is dropped
        if prop is None:
            return want
        n_ok = sum(1 for a, b in zip(prop.tokens, want) if a == b)
        self.kv.unreserve(prop.pages[n_ok:])
        return prop.tokens[:n_ok]

    def step_split(self, ctx: list[int], want: list[int]) -> tuple[list[int], list[int]]:
        prop = self.propose_lazy(ctx)  # clean: near miss, the tail goes back and the head goes to the caller
        if prop is None:
            return want, []
        n_ok = sum(1 for a, b in zip(prop.tokens, want) if a == b)
        self.kv.unreserve(prop.pages[n_ok:])
        return prop.tokens[:n_ok], prop.pages[:n_ok]

    def enqueue(self, ctx: list[int]) -> bool:
        prop = self.propose_lazy(ctx)  # clean: stored among the open proposals, settled by settle_all
        if prop is None:
            return False
        self.open_proposals.append(prop)
        return True

    def settle_all(self) -> int:
        n = 0
        while self.open_proposals:
            prop = self.open_proposals.pop()
            self.kv.unreserve(prop.pages)
            n += 1
        return n

    def accept_prob(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        ratio = self.logits.rent_logits()  # clean: in-place work only, handed back at the end
        torch.div(p, q, out=ratio)
        ratio.clamp_(max=1.0)
        res = ratio.clone()
        self.logits.hand_back(ratio)
        return res

    def residual(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor | None:
        diff = self.logits.rent_logits()  # leak: clamp makes a new tensor and the name is rebound to it
        torch.sub(p, q, out=diff)
        diff = diff.clamp(min=0.0)
        total = diff.sum()
        if total == 0:
            self.logits.hand_back(diff)
            return None
        res = diff / total
        self.logits.hand_back(diff)
        return res

    def residual_inplace(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor | None:
        diff = self.logits.rent_logits()  # clean: near miss, the in-place clamp returns the same tensor
        torch.sub(p, q, out=diff)
        diff = diff.clamp_(min=0.0)
        total = diff.sum()
        if total == 0:
            self.logits.hand_back(diff)
            return None
        res = diff / total
        self.logits.hand_back(diff)
        return res

    def sample_bonus(self, logits: torch.Tensor, temperature: float) -> int:
        work = self.logits.rent_logits()  # leak: greedy sampling returns early
        work.copy_(logits)
        if temperature == 0.0:
            return int(work.argmax())
        work.div_(temperature).softmax(dim=-1)
        tok = int(torch.multinomial(work.softmax(-1), 1))
        self.logits.hand_back(work)
        return tok

    def sample_many(self, rows: torch.Tensor, temperature: float) -> list[int]:
        out: list[int] = []
        for row in rows:
            work = self.logits.rent_logits()  # clean: near miss, both arms reach the hand back
            work.copy_(row)
            if temperature == 0.0:
                out.append(int(work.argmax()))
            else:
                out.append(int(torch.multinomial(work.div_(temperature).softmax(-1), 1)))
            self.logits.hand_back(work)
        return out
