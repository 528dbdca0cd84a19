from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Request:
    request_id: str
    prompt: list[int]
    max_tokens: int = 256
    lora: str | None = None
    image_hash: str | None = None
    status: Status = Status.WAITING
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    row: int | None = None
    image_slot: int | None = None
    lora_held: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)
