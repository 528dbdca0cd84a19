from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass
class Request:
    req_id: str
    prompt: list[int]
    max_tokens: int
    status: Status = Status.WAITING
    output: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    batch_slot: int = -1
    beam_slot: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)
