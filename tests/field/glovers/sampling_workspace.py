"""Sampling: bias buffers, grammar matchers and the processors that own them."""
from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

log = logging.getLogger(__name__)


class BiasBuffers:
    """Vocabulary sized rows. checkout() gives one, checkin() takes it back."""

    def __init__(self, rows: int, vocab: int):
        self.vocab = vocab
        self._rows = [[0.0] * vocab for _ in range(rows)]

    def checkout(self) -> list[float] | None:
        return self._rows.pop() if self._rows else None

    def checkin(self, row: list[float]) -> None:
        row[:] = [0.0] * self.vocab
        self._rows.append(row)


class Matcher:
    def __init__(self):
        self.state = 0
        self.grammar: str | None = None

    def reset(self, grammar: str) -> None:
        self.grammar = grammar
        self.state = 0

    def advance(self, token: int) -> bool:
        self.state += 1
        return token >= 0


class MatcherPool:
    def __init__(self, n: int):
        self._idle = [Matcher() for _ in range(n)]

    def obtain(self, grammar: str) -> Matcher | None:
        if not self._idle:
            return None
        m = self._idle.pop()
        m.reset(grammar)
        return m

    def recycle(self, m: Matcher) -> None:
        m.grammar = None
        self._idle.append(m)


class TieredMatcherPool:
    """A small local list in front of the shared pool."""

    def __init__(self, shared: MatcherPool, keep: int):
        self.shared = shared
        self.keep = keep
        self._local: list[Matcher] = []
        self._spares: list[Matcher] = []

    def fetch(self, grammar: str) -> Matcher | None:
        if self._local:
            m = self._local.pop()
            m.reset(grammar)
            return m
        return self.shared.obtain(grammar)  # clean: handed to the caller, store() takes it back

    def store(self, m: Matcher) -> None:
        if len(self._local) < self.keep:
            self._local.append(m)
        else:
            self.shared.recycle(m)

    def fill_spares(self, n: int) -> None:
        while len(self._spares) < n:
            m = self.shared.obtain("")  # leak: shrink() empties the spares without recycling them
            if m is None:
                break
            self._spares.append(m)

    def shrink(self) -> None:
        """Return to the shared pool what is not in use."""
        while self._local:
            self.shared.recycle(self._local.pop())
        self._spares = []


class Processor(ABC):
    def __init__(self, buffers: BiasBuffers):
        self.buffers = buffers
        self.row: list[float] | None = None

    def attach(self) -> bool:
        if self.row is None:
            self.row = self.buffers.checkout()  # clean: detach of the base class checks it in
        return self.row is not None

    @abstractmethod
    def apply(self, logits: list[float]) -> None: ...

    def detach(self) -> None:
        if self.row is not None:
            self.buffers.checkin(self.row)
            self.row = None


class RepetitionPenalty(Processor):
    def observe(self, token: int) -> None:
        if self.row is not None:
            self.row[token] += 1.0

    def apply(self, logits: list[float]) -> None:
        for i, seen in enumerate(self.row or ()):
            logits[i] -= 0.1 * seen


class GrammarMask(Processor):
    def __init__(self, buffers: BiasBuffers, pool: TieredMatcherPool, grammar: str):
        super().__init__(buffers)
        self.pool = pool
        self.matcher = pool.fetch(grammar)  # clean: near miss, the overriding detach stores it

    def apply(self, logits: list[float]) -> None:
        if self.matcher is not None and self.row is not None:
            for i in range(len(logits)):
                logits[i] += self.row[i]

    def detach(self) -> None:
        if self.matcher is not None:
            self.pool.store(self.matcher)
            self.matcher = None
        super().detach()


class ToolCallMask(Processor):
    """Grammar that is only active after the trigger token."""

    def __init__(self, buffers: BiasBuffers, pool: TieredMatcherPool, trigger: int):
        super().__init__(buffers)
        self.pool = pool
        self.trigger = trigger
        self.matcher: Matcher | None = None

    def observe(self, token: int) -> None:
        if token == self.trigger and self.matcher is None:
            self.matcher = self.pool.fetch("tool_call")  # leak: the overriding detach only sets it to None
        elif self.matcher is not None:
            self.matcher.advance(token)

    def apply(self, logits: list[float]) -> None:
        if self.matcher is not None:
            logits[self.trigger] = float("-inf")

    def detach(self) -> None:
        self.matcher = None
        super().detach()


@dataclass
class BiasView:
    """A row together with the knowledge whether it has to be returned."""
    row: list[float]
    owned: bool


class Sampler:
    def __init__(self, buffers: BiasBuffers, matchers: TieredMatcherPool):
        self.buffers = buffers
        self.matchers = matchers
        self.shared_row = [0.0] * buffers.vocab
        self.chains: dict[int, list[Processor]] = {}

    def build(self, rid: int, processors: list[Processor]) -> bool:
        for p in processors:
            if not p.attach():
                for q in processors:
                    q.detach()
                return False
        self.chains[rid] = processors
        return True

    def remove(self, rid: int) -> None:
        for p in self.chains.pop(rid, ()):
            p.detach()

    def _view(self, bias: dict[int, float]) -> BiasView | None:
        if not bias:
            return BiasView(self.shared_row, owned=False)
        row = self.buffers.checkout()  # clean: in the view that is returned, marked as owned
        if row is None:
            return None
        for token, value in bias.items():
            row[token] = value
        return BiasView(row, owned=True)

    def _done(self, view: BiasView) -> None:
        if view.owned:
            self.buffers.checkin(view.row)

    def sample(self, logits: list[float], bias: dict[int, float]) -> int:
        view = self._view(bias)  # clean: near miss, _done checks it in when it is owned
        if view is None:
            return -1
        best = max(range(len(logits)), key=lambda i: logits[i] + view.row[i])
        self._done(view)
        return best

    def sample_greedy(self, logits: list[float], bias: dict[int, float]) -> int:
        view = self._view(bias)  # leak: an owned row is returned only for tokens other than the first one
        if view is None:
            return -1
        best = max(range(len(logits)), key=lambda i: logits[i] + view.row[i])
        if best == 0:
            return best
        self._done(view)
        return best

    def accepts(self, grammar: str, tokens: list[int]) -> bool:
        m = self.matchers.fetch(grammar)  # leak: a rejected token returns False with the matcher outside
        if m is None:
            return False
        for token in tokens:
            if not m.advance(token):
                return False
        self.matchers.store(m)
        return True

    def accepted_prefix(self, grammar: str, tokens: list[int]) -> int:
        m = self.matchers.fetch(grammar)  # clean: near miss, break leads to the store behind the loop
        if m is None:
            return 0
        n = 0
        for token in tokens:
            if not m.advance(token):
                break
            n += 1
        self.matchers.store(m)
        return n

    def any_of(self, grammars: list[str], token: int) -> str | None:
        tried: list[Matcher] = []
        winner = None
        for grammar in grammars:
            m = self.matchers.fetch(grammar)  # clean: near miss, all that were tried are stored, the winner as well
            if m is None:
                continue
            tried.append(m)
            if m.advance(token):
                winner = grammar
                break
        for m in tried:
            self.matchers.store(m)
        return winner

    def softmax_row(self, logits: list[float]) -> list[float] | None:
        """Row of probabilities, to be checked in by the caller."""
        row = self.buffers.checkout()  # clean: returned to the caller
        if row is None:
            return None
        top = max(logits)
        for i, x in enumerate(logits):
            row[i] = 2.718281828 ** (x - top)
        return row

    def top_p(self, logits: list[float], p: float) -> list[int]:
        row = self.softmax_row(logits)  # leak: only the order is kept, the row is never checked in
        if row is None:
            return []
        total, acc, kept = sum(row), 0.0, []
        for i in sorted(range(len(row)), key=row.__getitem__, reverse=True):
            kept.append(i)
            acc += row[i] / total
            if acc >= p:
                break
        return kept

    def entropy_proxy(self, logits: list[float]) -> float:
        row = self.softmax_row(logits)  # clean: checked in before the return
        if row is None:
            return 0.0
        value = max(row) / sum(row)
        self.buffers.checkin(row)
        return value
