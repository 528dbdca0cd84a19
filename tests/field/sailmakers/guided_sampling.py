"""Structured output: pooled grammar matchers, token bitmask rows and logits buffers around the sampler."""
from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

logger = logging.getLogger(__name__)


class GrammarError(ValueError):
    pass


class MatcherPool:
    """Compiled matchers are expensive to make and cheap to reset, so they are kept per grammar."""

    def __init__(self, compiler, per_grammar: int = 8):
        self.compiler = compiler
        self.per_grammar = per_grammar
        self.parked: Dict[str, List[Any]] = {}
        self.live = 0

    def summon(self, grammar: str):
        self.live += 1
        stack = self.parked.get(grammar)
        if stack:
            return stack.pop()  # clean: returned to the caller
        return self.compiler.new_matcher(grammar)  # clean: returned to the caller

    def dismiss(self, grammar: str, m) -> None:
        self.live -= 1
        m.reset()
        stack = self.parked.setdefault(grammar, [])
        if len(stack) < self.per_grammar:
            stack.append(m)


class BitmaskRows:
    def __init__(self, rows: int, vocab: int):
        self.table = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32)
        self.busy = [False] * rows

    def row(self) -> int:
        for i, b in enumerate(self.busy):
            if not b:
                self.busy[i] = True
                return i
        raise RuntimeError("bitmask rows exhausted")

    def row_or_none(self) -> Optional[int]:
        try:
            return self.row()  # clean: returned to the caller
        except RuntimeError:
            return None

    def clear(self, i: int) -> None:
        self.table[i].fill_(-1)
        self.busy[i] = False


class LogitsBuffers:
    def __init__(self, vocab: int, device: str):
        self.vocab, self.device = vocab, device
        self._by_batch: Dict[int, List[torch.Tensor]] = {}

    def get(self, batch: int) -> torch.Tensor:
        spare = self._by_batch.get(batch)
        if spare:
            return spare.pop()  # clean: returned to the caller
        return torch.empty(batch, self.vocab, device=self.device)

    def get_like(self, t: torch.Tensor) -> torch.Tensor:
        out = self.get(t.shape[0])  # clean: returned to the caller
        out.copy_(t)
        return out

    def done(self, t: torch.Tensor) -> None:
        self._by_batch.setdefault(t.shape[0], []).append(t)

    @contextmanager
    def temp(self, batch: int):
        t = self.get(batch)  # leak: GrammarError from the body of temp() in sample_checked() skips done()
        yield t
        self.done(t)


class GuidedState:
    def __init__(self, grammar: str, matcher, row: int):
        self.grammar = grammar
        self.matcher = matcher
        self.row = row


class GuidedSampler:
    def __init__(self, matchers: MatcherPool, rows: BitmaskRows, bufs: LogitsBuffers):
        self.matchers, self.rows, self.bufs = matchers, rows, bufs
        self.states: Dict[str, GuidedState] = {}

    def attach(self, rid: str, grammar: str) -> bool:
        if rid in self.states:
            return True
        row = self.rows.row_or_none()  # clean: near miss, moved into self.states, which detach() empties
        if row is None:
            return False
        m = self.matchers.summon(grammar)  # clean: moved into self.states
        self.states[rid] = GuidedState(grammar, m, row)
        return True

    def attach_checked(self, rid: str, grammar: str, prefix: Sequence[int]) -> None:
        m = self.matchers.summon(grammar)  # leak: a rejected prefix raises GrammarError without dismiss
        for tok in prefix:
            if not m.accept(tok):
                raise GrammarError(f"{rid}: prefix token {tok} does not fit the grammar")
        row = self.rows.row_or_none()  # clean: moved into self.states
        if row is None:
            self.matchers.dismiss(grammar, m)
            raise GrammarError("no bitmask row")
        self.detach(rid)
        self.states[rid] = GuidedState(grammar, m, row)

    def detach(self, rid: str) -> None:
        st = self.states.pop(rid, None)
        if st is None:
            return
        self.matchers.dismiss(st.grammar, st.matcher)
        self.rows.clear(st.row)

    def validate(self, grammar: str, text_tokens: Sequence[int]) -> bool:
        m = self.matchers.summon(grammar)  # leak: the first refused token returns False without dismiss
        for t in text_tokens:
            if not m.accept(t):
                return False
        done = m.terminated()
        self.matchers.dismiss(grammar, m)
        return done

    def sample(self, rids: List[str], logits: torch.Tensor) -> torch.Tensor:
        work = self.bufs.get_like(logits)  # clean: done in finally
        try:
            for i, rid in enumerate(rids):
                st = self.states.get(rid)
                if st is None:
                    continue
                st.matcher.fill(self.rows.table, st.row)
                self._apply(work[i], st.row)
            return torch.multinomial(work.softmax(-1), 1).squeeze(-1)
        finally:
            self.bufs.done(work)

    def sample_checked(self, rids: List[str], logits: torch.Tensor) -> torch.Tensor:
        with self.bufs.temp(len(rids)) as work:  # leak: temp() has no finally and the dead-state check raises inside
            work.copy_(logits)
            for i, rid in enumerate(rids):
                st = self.states[rid]
                self._apply(work[i], st.row)
                if torch.isinf(work[i]).all():
                    raise GrammarError(f"{rid}: no token allowed")
            return work.argmax(-1)

    def _apply(self, row_logits: torch.Tensor, row: int) -> None:
        bits = self.rows.table[row]
        mask = (bits[:, None] >> torch.arange(32)) & 1
        row_logits.masked_fill_(mask.reshape(-1)[:row_logits.numel()].to(row_logits.device) == 0, float("-inf"))

    def _biased(self, logits: torch.Tensor, bias: Dict[int, float]) -> torch.Tensor:
        """A pooled copy of logits with the bias added; the caller is done with it."""
        work = self.bufs.get_like(logits)  # clean: returned to the caller
        for tok, b in bias.items():
            work[:, tok] += b
        return work

    def logprobs(self, logits: torch.Tensor, bias: Dict[int, float], k: int) -> Tuple[torch.Tensor, torch.Tensor]:
        work = self._biased(logits, bias)  # clean: done after topk
        top = work.log_softmax(-1).topk(k)
        self.bufs.done(work)
        return top.values, top.indices

    def greedy_with_bias(self, logits: torch.Tensor, bias: Dict[int, float]) -> torch.Tensor:
        return self._biased(logits, bias).argmax(-1)  # leak: the pooled copy is only read by argmax and dropped

    def close(self) -> None:
        for rid in list(self.states):
            self.detach(rid)
