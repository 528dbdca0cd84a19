"""Pages of the two KV caches (draft and target)."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Iterable, Optional

import torch

logger = logging.getLogger(__name__)


class PagesExhausted(RuntimeError):
    pass


@dataclass(eq=False)
class Page:
    number: int
    tensor: torch.Tensor
    filled: int = 0

    @property
    def room(self) -> int:
        return self.tensor.shape[0] - self.filled


class PagePool:
    def __init__(self, pages: int, tokens: int, width: int) -> None:
        self.tokens = tokens
        self._spare: deque[Page] = deque(Page(i, torch.zeros(tokens, width)) for i in range(pages))
        self._quarantine: list[Page] = []

    def __len__(self) -> int:
        return len(self._spare)

    def draw(self) -> Page:
        try:
            page = self._spare.popleft()  # clean: reset and returned
        except IndexError:
            raise PagesExhausted("out of pages") from None
        page.filled = 0
        return page

    def draw_upto(self, n: int) -> list[Page]:
        out: list[Page] = []
        while len(out) < n and self._spare:
            out.append(self._spare.popleft())  # clean: the list is returned, short or not
        return out

    def draw_exactly(self, n: int) -> Optional[list[Page]]:
        out = self.draw_upto(n)  # leak: a short list is answered with None and not shed
        if len(out) != n:
            return None
        return out

    def draw_or_steal(self, victims: Iterable[list[Page]]) -> Page:
        if self._spare:
            return self.draw()  # clean: passed on
        for pages in victims:
            if pages:
                stolen = pages.pop()  # clean: leaves the victim's list for the caller
                stolen.filled = 0
                return stolen
        raise PagesExhausted("nobody to steal from")

    def draw_verified(self) -> Optional[Page]:
        """A page without NaN residue; suspicious pages wait in quarantine."""
        while self._spare:
            page = self._spare.popleft()  # clean: returned or quarantined, and quarantine is emptied by heal
            if torch.isnan(page.tensor).any():
                self._quarantine.append(page)
                continue
            return page
        return None

    def heal(self) -> int:
        n = len(self._quarantine)
        while self._quarantine:
            page = self._quarantine.pop()
            page.tensor.zero_()
            self.shed(page)
        return n

    def shed(self, page: Page) -> None:
        self._spare.append(page)

    def shed_all(self, pages: list[Page]) -> None:
        while pages:
            self.shed(pages.pop())
