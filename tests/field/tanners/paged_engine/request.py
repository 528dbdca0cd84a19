from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import List, Optional


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    DONE = 3
    ABORTED = 4


@dataclass
class Request:
    rid: int
    prompt: List[int]
    max_tokens: int = 16
    status: Status = Status.WAITING
    output: List[int] = field(default_factory=list)
    blocks: List[int] = field(default_factory=list)
    encoder_slot: Optional[int] = None
    sampling_row: Optional[int] = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)
