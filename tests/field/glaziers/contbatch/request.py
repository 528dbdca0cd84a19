import enum
import itertools
from dataclasses import dataclass, field
from typing import List, Optional

_ids = itertools.count()


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()
    ABORTED = enum.auto()


@dataclass(eq=False)
class Request:
    prompt: List[int]
    max_new: int
    priority: int = 0
    rid: int = field(default_factory=lambda: next(_ids))
    status: Status = Status.WAITING
    output: List[int] = field(default_factory=list)
    pages: List[int] = field(default_factory=list)
    cross_pages: List[int] = field(default_factory=list)
    batch_slot: Optional[int] = None
    lora_slot: Optional[int] = None
    sampler_row: Optional[int] = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)
