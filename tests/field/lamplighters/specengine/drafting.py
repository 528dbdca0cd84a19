"""Draft side: propose a handful of tokens on scratch pages."""
from __future__ import annotations

import logging
from typing import Callable, Iterator, Optional

import torch

from .pages import Page, PagePool, PagesExhausted
from .request import GenRequest

logger = logging.getLogger(__name__)

Model = Callable[[torch.Tensor], torch.Tensor]


class DraftRejected(Exception):
    pass


def scratch_for(pool: PagePool, req: GenRequest) -> Page:
    """A page primed with the tail of the request; the caller sheds it."""
    page = pool.draw()  # clean: returned to the caller
    tail = req.prompt[-pool.tokens :]
    page.filled = len(tail)
    return page


def logits_of(pool: PagePool, model: Model, req: GenRequest) -> torch.Tensor:
    page = scratch_for(pool, req)  # clean: shed in the finally, the result is a clone
    try:
        return model(page.tensor[: page.filled]).clone()
    finally:
        pool.shed(page)


def run_scratch(pool: PagePool, model: Model, req: GenRequest) -> Page:
    """Run the model in place on a scratch page and return that page."""
    page = scratch_for(pool, req)  # clean: ownership passes to the caller
    page.tensor[: page.filled].copy_(model(page.tensor[: page.filled]))
    return page


def entropy(pool: PagePool, model: Model, req: GenRequest) -> float:
    probs = run_scratch(pool, model, req).tensor.clone().softmax(-1)  # leak: the scratch page is cloned from and dropped
    return float(-(probs * probs.log()).sum())


class Drafter:
    def __init__(self, pool: PagePool, model: Model, width: int = 4, floor: float = 0.1) -> None:
        self.pool = pool
        self.model = model
        self.width = width
        self.floor = floor

    def propose(self, req: GenRequest) -> Optional[list[int]]:
        try:
            page = run_scratch(self.pool, self.model, req)  # leak: a low score raises DraftRejected, the handler has no shed
            scores = page.tensor[: self.width].max(-1)
            self._gate(scores.values)
        except DraftRejected:
            return None
        except PagesExhausted:
            logger.debug("no scratch page for %s", req.rid)
            return None
        tokens = scores.indices.tolist()
        self.pool.shed(page)
        return tokens

    def _gate(self, values: torch.Tensor) -> None:
        if float(values.min()) < self.floor:
            raise DraftRejected()

    def propose_gated(self, req: GenRequest) -> list[int]:
        page = run_scratch(self.pool, self.model, req)  # clean: shed before the gate may raise
        scores = page.tensor[: self.width].max(-1)
        self.pool.shed(page)
        self._gate(scores.values)
        return scores.indices.tolist()

    def beams(self, req: GenRequest, n: int) -> Iterator[Page]:
        """One scratch page per beam; all are shed when the generator ends."""
        live: list[Page] = []
        try:
            for _ in range(n):
                live.append(run_scratch(self.pool, self.model, req))  # clean: finally, also on close
                yield live[-1]
        finally:
            self.pool.shed_all(live)

    def best_beam(self, req: GenRequest, n: int) -> Optional[Page]:
        """The scratch page with the highest score; the caller sheds it."""
        best: Optional[Page] = None
        top = float("-inf")
        for _ in range(n):
            page = run_scratch(self.pool, self.model, req)  # leak: a better page displaces best without a shed
            score = float(page.tensor.max())
            if score > top:
                best, top = page, score
            else:
                self.pool.shed(page)
        return best

    def longest_beam(self, req: GenRequest, n: int) -> Optional[Page]:
        best: Optional[Page] = None
        for _ in range(n):
            try:
                page = run_scratch(self.pool, self.model, req)  # clean: the loser of each comparison is shed, the winner returned
            except PagesExhausted:
                break
            if best is not None and best.filled >= page.filled:
                self.pool.shed(page)
                continue
            best, loser = page, best
            if loser is not None:
                self.pool.shed(loser)
        return best
