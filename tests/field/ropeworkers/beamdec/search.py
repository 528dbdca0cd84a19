"""Beam search over hypotheses."""

import heapq
from typing import List, Optional

from .arena import CellArena, LogitBuffers
from .hypothesis import Hypothesis
from .scoring import contrast, log_probs


class BeamSearch:
    def __init__(self, arena: CellArena, buffers: LogitBuffers, model, width: int, eos: int):
        self.arena = arena
        self.buffers = buffers
        self.model = model
        self.width = width
        self.eos = eos
        self.beams: List[Hypothesis] = []
        self.finished: List[Hypothesis] = []

    def begin(self, prompt: List[int]) -> bool:
        if self.beams or self.finished:
            return False
        first = Hypothesis(self.arena, [])
        for t in prompt:
            if not first.extend(t, 0.0):
                first.dispose()
                return False
        self.beams = [first]
        return True

    def step(self) -> bool:
        logits = self.model([h.tokens for h in self.beams])
        lp = log_probs(self.buffers, logits)  # clean: shelved once the top candidates are read out
        top = lp.topk(self.width, dim=-1)
        cands = [
            (float(s) + h.score, i, int(t), float(s))
            for i, h in enumerate(self.beams)
            for s, t in zip(top.values[i], top.indices[i])
        ]
        self.buffers.shelve(lp)
        nxt: List[Hypothesis] = []
        for _, i, tok, s in heapq.nlargest(self.width, cands):
            h = self.beams[i].clone()  # leak: a clone that cannot be extended is dropped with its cells
            if h is None:
                break
            if not h.extend(tok, s):
                continue
            (self.finished if tok == self.eos else nxt).append(h)
        for h in self.beams:
            h.dispose()
        self.beams = nxt
        return bool(nxt)

    def step_contrastive(self, amateur, beta: float) -> Optional[int]:
        """Greedy on the best beam with contrastive scores."""
        best = max(self.beams, key=lambda h: h.score)
        cd = contrast(self.buffers, self.model([best.tokens]), amateur([best.tokens]), beta)  # leak: not shelved when the end token is chosen
        tok = int(cd[0].argmax())
        if tok == self.eos:
            return None
        logp = float(cd[0, tok])
        self.buffers.shelve(cd)
        return tok if best.extend(tok, logp) else None

    def branch(self, at: int) -> bool:
        """Fork the best beam at an earlier position."""
        h = max(self.beams, key=lambda b: b.score).clone()  # clean: near miss, disposed of when there is no place for it
        if h is None:
            return False
        h.truncate(at)
        if len(self.beams) >= self.width:
            h.dispose()
            return False
        self.beams.append(h)
        return True

    def finish(self) -> List[int]:
        best = max(self.finished or self.beams, key=lambda h: h.score)
        out = list(best.tokens)
        for h in self.beams + self.finished:
            h.dispose()
        self.beams, self.finished = [], []
        return out
