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
    request_id: str
    prompt: list[int]
    max_tokens: int = 16
    status: Status = Status.WAITING
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    sampler_slot: int | None = None
    grammar_slot: int | None = None
    guided: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def done(self) -> bool:
        return len(self.output) >= self.max_tokens
