import enum
from dataclasses import dataclass, field
from typing import List

from .block_manager import KVBlock


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


@dataclass(eq=False)
class Request:
    request_id: str
    prompt: List[int]
    max_tokens: int = 128
    priority: int = 0
    status: Status = Status.WAITING
    blocks: List[KVBlock] = field(default_factory=list)
    lookahead: List[KVBlock] = field(default_factory=list)
    output: List[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)
