from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import List, Optional


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    ABORTED = 3


@dataclass(eq=False)
class Request:
    rid: str
    tokens: List[int]
    max_tokens: int = 16
    mm_hash: Optional[str] = None
    status: Status = Status.WAITING
    blocks: List[int] = field(default_factory=list)
    output: List[int] = field(default_factory=list)
    grammar: Optional[object] = None
