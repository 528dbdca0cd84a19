from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import List, Optional


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


@dataclass
class Request:
    rid: str
    prompt_len: int
    max_tokens: int
    priority: int = 0
    computed: int = 0
    generated: int = 0
    status: Status = Status.WAITING
    row: Optional[int] = None
    pages: List[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.prompt_len + self.generated

    @property
    def done(self) -> bool:
        return self.generated >= self.max_tokens
