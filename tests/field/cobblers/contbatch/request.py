from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import List, Optional

from .pages import PageAllocator, PageRun


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    DONE = enum.auto()


@dataclass(eq=False)
class Request:
    rid: str
    prompt_pages: int
    lora: Optional[str] = None
    status: Status = Status.WAITING
    runs: List[PageRun] = field(default_factory=list)
    lookahead: Optional[PageRun] = None

    def release(self, alloc: PageAllocator) -> None:
        for run in self.runs:
            alloc.unref(run)
        self.runs.clear()
        if self.lookahead is not None:
            alloc.unref(self.lookahead)
            self.lookahead = None

    def fork(self, rid: str, alloc: PageAllocator) -> "Request":
        child = Request(rid, self.prompt_pages, self.lora, self.status)
        child.runs = [alloc.ref(run) for run in self.runs]  # clean: owned by the child until its release()
        return child
