from __future__ import annotations

import enum
from dataclasses import dataclass, field


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass
class Request:
    rid: str
    prompt: list[int]
    max_new: int
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    state: State = State.WAITING

    def attach(self, blocks: list[int]) -> None:
        self.blocks.extend(blocks)

    def detach(self) -> list[int]:
        blocks, self.blocks = self.blocks, []
        return blocks

    def blocks_needed(self, block: int) -> int:
        total = len(self.prompt) + len(self.output) + 1
        return max(0, -(-total // block) - len(self.blocks))
