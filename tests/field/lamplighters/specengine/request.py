"""Requests and the page lists that they carry."""
from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Optional

from .pages import Page, PagePool


class Status(enum.IntEnum):
    WAITING = 0
    ACTIVE = 1
    PREEMPTED = 2
    FINISHED = 3


class PromptTooLong(ValueError):
    pass


@dataclass(eq=False)
class GenRequest:
    rid: str
    prompt: list[int]
    max_new: int = 64
    status: Status = Status.WAITING
    draft_pages: list[Page] = field(default_factory=list)
    target_pages: list[Page] = field(default_factory=list)
    lookahead: Optional[Page] = None
    output: list[int] = field(default_factory=list)

    def check(self, limit: int) -> None:
        if len(self.prompt) > limit:
            raise PromptTooLong(self.rid)

    def room_for(self, pool: PagePool, n: int) -> None:
        """Make sure the target cache can take ``n`` more tokens."""
        room = self.target_pages[-1].room if self.target_pages else 0
        while room < n:
            page = pool.draw()  # clean: appended, forget sheds it
            self.target_pages.append(page)
            room += page.room

    def adopt(self, draft: list[Page], target: list[Page]) -> None:
        self.draft_pages.extend(draft)
        self.target_pages.extend(target)

    def set_lookahead(self, pool: PagePool) -> Page:
        if self.lookahead is None or not self.lookahead.room:
            self.lookahead = pool.draw()  # leak: a full lookahead page is overwritten by the new one
        return self.lookahead

    def forget(self, draft_pool: PagePool, target_pool: PagePool) -> None:
        draft_pool.shed_all(self.draft_pages)
        target_pool.shed_all(self.target_pages)
        if self.lookahead is not None:
            draft_pool.shed(self.lookahead)
            self.lookahead = None
