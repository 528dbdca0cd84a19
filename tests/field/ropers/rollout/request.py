from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import List, Optional


class State(enum.Enum):
    WAITING = 0
    RUNNING = 1
    DONE = 2


@dataclass
class Sample:
    rid: int
    prompt: List[int]
    max_new: int
    group: Optional[int] = None
    blocks: List[int] = field(default_factory=list)
    output: List[int] = field(default_factory=list)
    state: State = State.WAITING

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)
