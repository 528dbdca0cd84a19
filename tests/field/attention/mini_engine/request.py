import enum
from dataclasses import dataclass, field
from typing import List, Optional

import torch


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    DONE = 2
    ABORTED = 3


@dataclass
class Request:
    rid: int
    prompt: List[int]
    max_new: int = 16
    output: List[int] = field(default_factory=list)
    status: Status = Status.WAITING
    row: Optional[int] = None
    locs: List[torch.Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def finished(self) -> bool:
        return len(self.output) >= self.max_new
