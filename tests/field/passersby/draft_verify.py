"""Speculative decoding: proposer and verifier share one paged cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Protocol, Sequence

import torch


class TargetModel(Protocol):
    def logits(self, token_ids: Sequence[int], pages: Sequence[int]) -> torch.Tensor: ...


@dataclass
class Draft:
    seq_id: int
    tokens: List[int]
    pages: List[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


class PageStore:
    """Pages 0..n-1, kept as a stack; reserve() is partial when the stack runs low."""

    def __init__(self, n: int) -> None:
        self._stack = list(range(n - 1, -1, -1))

    def reserve(self, n: int) -> List[int]:
        taken = self._stack[-n:] if n else []  # clean: exactly these leave the stack and go to the caller
        del self._stack[len(self._stack) - len(taken):]
        return taken

    def reserve_one(self) -> int:
        if not self._stack:
            raise LookupError("out of pages")
        return self._stack.pop()  # clean: handed to the caller

    def unreserve(self, pages: Sequence[int]) -> None:
        self._stack.extend(pages)

    def __len__(self) -> int:
        return len(self._stack)


class SpeculativeWorker:
    def __init__(self, target: TargetModel, store: PageStore, k: int, page_tokens: int = 16) -> None:
        self.target = target
        self.store = store
        self.k = k
        self.page_tokens = page_tokens
        self.committed: Dict[int, List[int]] = {}
        self.open_drafts: Dict[int, Draft] = {}

    def _need(self, n: int) -> int:
        return (n + self.page_tokens - 1) // self.page_tokens

    def propose(self, seq_id: int, last: int) -> Optional[Draft]:
        pages = self.store.reserve(self._need(self.k))  # clean: near miss, a partial grant is given up before None
        if len(pages) < self._need(self.k):
            self.store.unreserve(pages)
            return None
        self.discard(seq_id)
        d = Draft(seq_id, [last + i for i in range(self.k)], pages)
        self.open_drafts[seq_id] = d
        return d

    def propose_tree(self, seq_id: int, last: int, width: int) -> List[Draft]:
        drafts: List[Draft] = []
        for w in range(width):
            pages = self.store.reserve(self._need(self.k))  # leak: the partial grant of the last branch is dropped by break
            if len(pages) < self._need(self.k):
                break
            drafts.append(Draft(seq_id, [last + w] * self.k, pages))
        return drafts

    def verify(self, d: Draft) -> int:
        logits = self.target.logits(d.tokens, self.committed.get(d.seq_id, []) + d.pages)
        greedy = logits.argmax(dim=-1).tolist()
        n = 0
        while n < len(d) and greedy[n] == d.tokens[n]:
            n += 1
        return n

    def commit(self, d: Draft, accepted: int) -> None:
        keep = self._need(accepted)
        self.committed.setdefault(d.seq_id, []).extend(d.pages[:keep])
        self.store.unreserve(d.pages[keep:])
        d.pages = []
        if self.open_drafts.get(d.seq_id) is d:
            del self.open_drafts[d.seq_id]

    def step(self, seq_id: int, last: int) -> int:
        d = self.propose(seq_id, last)  # clean: near miss, commit moves or frees all of its pages
        if d is None:
            return 0
        n = self.verify(d)
        self.commit(d, n)
        return n

    def step_tree(self, seq_id: int, last: int, width: int) -> int:
        drafts = self.propose_tree(seq_id, last, width)  # leak: only the best branch is committed, the others keep their pages
        if not drafts:
            return 0
        best = max(drafts, key=self.verify)
        n = self.verify(best)
        self.commit(best, n)
        return n

    def step_tree_strict(self, seq_id: int, last: int, width: int) -> int:
        drafts = self.propose_tree(seq_id, last, width)  # clean: near miss, the losers are unreserved one by one
        best: Optional[Draft] = None
        score = -1
        for d in drafts:
            s = self.verify(d)
            if s > score:
                if best is not None:
                    self.store.unreserve(best.pages)
                best, score = d, s
            else:
                self.store.unreserve(d.pages)
        if best is None:
            return 0
        self.commit(best, score)
        return score

    def bonus_token(self, seq_id: int, token: int) -> bool:
        page = self.store.reserve_one()  # leak: when the tail page still has room False is returned with the new page
        pages = self.committed.setdefault(seq_id, [])
        if pages and token % self.page_tokens:
            return False
        pages.append(page)
        return True

    def append_page(self, seq_id: int, token: int) -> bool:
        if token % self.page_tokens:
            return False
        self.committed.setdefault(seq_id, []).append(self.store.reserve_one())  # clean: in the committed table, drop() unreserves
        return True

    def rescore(self, seq_id: int, tokens: List[int]) -> torch.Tensor:
        pages = self.store.reserve(self._need(len(tokens)))  # leak: only the first half is unreserved
        try:
            return self.target.logits(tokens, pages).softmax(-1)
        finally:
            self.store.unreserve(pages[: len(pages) // 2])

    def score(self, tokens: List[int]) -> float:
        pages = self.store.reserve(self._need(len(tokens)))  # clean: unreserved in finally
        try:
            return float(self.target.logits(tokens, pages).logsumexp(-1).sum())
        finally:
            self.store.unreserve(pages)

    def discard(self, seq_id: int) -> None:
        d = self.open_drafts.pop(seq_id, None)
        if d is not None:
            self.store.unreserve(d.pages)

    def drop(self, seq_id: int) -> None:
        self.discard(seq_id)
        self.store.unreserve(self.committed.pop(seq_id, []))
