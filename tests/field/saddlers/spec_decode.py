"""Speculative decoding: draft proposals and verification on pooled logits buffers."""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional


class LogitsBuf:
    def __init__(self, rows: int, vocab: int) -> None:
        self.rows = rows
        self.vocab = vocab
        self.data = [[0.0] * vocab for _ in range(rows)]

    def copy(self) -> List[List[float]]:
        return [list(r) for r in self.data]


class LogitsPool:
    def __init__(self, rows: int, vocab: int, count: int) -> None:
        self.rows = rows
        self._stack = [LogitsBuf(rows, vocab) for _ in range(count)]
        self.count = count

    def rent(self) -> LogitsBuf:
        return self._stack.pop()

    def restitute(self, buf: LogitsBuf) -> None:
        assert buf not in self._stack
        self._stack.append(buf)

    def free_count(self) -> int:
        return len(self._stack)


@dataclass
class Proposal:
    tokens: List[int]
    logits: Optional[LogitsBuf]
    pooled: bool = False


class DraftModel:
    """``static`` is used in graph capture and belongs to the model itself."""

    def __init__(self, pool: LogitsPool, vocab: int) -> None:
        self.pool = pool
        self.vocab = vocab
        self.static = LogitsBuf(pool.rows, vocab)
        self.capturing = False

    def forward(self, last: int, k: int) -> LogitsBuf:
        buf = self.pool.rent()  # clean: handed to the caller
        for i in range(min(k, buf.rows)):
            buf.data[i][(last + i + 1) % self.vocab] = 1.0
        return buf

    def propose(self, last: int, k: int) -> Proposal:
        toks = [(last + i + 1) % self.vocab for i in range(k)]
        if self.capturing:
            return Proposal(toks, self.static)
        return Proposal(toks, self.forward(last, k), pooled=True)  # clean: the proposal carries it with the pooled flag

    def dispose(self, prop: Proposal) -> None:
        if prop.pooled and prop.logits is not None:
            self.pool.restitute(prop.logits)
        prop.logits = None


class SpecDecoder:
    def __init__(self, draft: DraftModel, pool: LogitsPool, k: int = 3) -> None:
        self.draft = draft
        self.pool = pool
        self.k = k
        self.history: List[Proposal] = []

    def _accept(self, target: LogitsBuf, toks: List[int]) -> int:
        return sum(1 for i, t in enumerate(toks) if i < target.rows and target.data[i][t] >= 0)

    def step(self, last: int) -> List[int]:
        prop = self.draft.propose(last, self.k)  # clean: near miss, dispose gives it back when it is pooled
        target = self.pool.rent()  # clean: given back in the finally
        try:
            n = self._accept(target, prop.tokens)
            if n == 0:
                return []
            return prop.tokens[:n]
        finally:
            self.pool.restitute(target)
            self.draft.dispose(prop)

    def step_greedy(self, last: int) -> List[int]:
        prop = self.draft.propose(last, self.k)  # leak: no accepted token returns before dispose
        target = self.pool.rent()  # clean: given back ahead of both returns
        n = self._accept(target, prop.tokens)
        self.pool.restitute(target)
        if n == 0:
            return []
        self.draft.dispose(prop)
        return prop.tokens[:n]

    def draft_chain(self, last: int, depth: int) -> List[int]:
        """Drafts token by token, each on the logits of the one before."""
        toks: List[int] = []
        logits = self.draft.forward(last, 1)  # leak: rebound in the loop
        for _ in range(depth):
            row = logits.data[0]
            last = row.index(max(row))
            toks.append(last)
            logits = self.draft.forward(last, 1)  # leak: rebound by the next turn, only the last is given back
        self.pool.restitute(logits)
        return toks

    def draft_chain_tight(self, last: int, depth: int) -> List[int]:
        toks: List[int] = []
        logits = self.draft.forward(last, 1)  # clean: near miss, given back ahead of each rebinding and at the end
        for _ in range(depth):
            row = logits.data[0]
            last = row.index(max(row))
            toks.append(last)
            self.pool.restitute(logits)
            logits = self.draft.forward(last, 1)  # clean: near miss, the same
        self.pool.restitute(logits)
        return toks

    def draft_probs(self, last: int) -> List[List[float]]:
        return self.draft.forward(last, self.k).copy()  # leak: copied and dropped

    def remember(self, last: int) -> None:
        prop = self.draft.propose(last, self.k)  # clean: near miss, the oldest is disposed and the rest by clear
        self.history.append(prop)
        if len(self.history) > 2:
            self.draft.dispose(self.history.pop(0))

    def clear(self) -> None:
        for prop in self.history:
            self.draft.dispose(prop)
        self.history = []


def main() -> None:
    pool = LogitsPool(4, 8, 8)
    dec = SpecDecoder(DraftModel(pool, 8), pool)
    assert dec.step(1) == [2, 3, 4]
    dec.step_greedy(1)
    dec.draft_chain_tight(0, 2)
    dec.draft_chain(0, 0)
    for t in range(4):
        dec.remember(t)
    dec.clear()
    assert pool.free_count() == pool.count
    dec.draft_probs(1)


if __name__ == "__main__":
    main()
