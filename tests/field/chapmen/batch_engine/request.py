"""Request state shared by the engine's phases."""
from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import List, Optional

from .slots import OutputBuffers, SlotTable


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    ABORTED = "aborted"


@dataclass
class Request:
    rid: str
    prompt: List[int]
    max_tokens: int
    n: int = 1
    status: Status = Status.WAITING
    row: int = -1
    extra_rows: List[int] = field(default_factory=list)
    text: Optional[bytearray] = None
    output: List[int] = field(default_factory=list)

    def bind(self, row: int) -> None:
        self.row = row
        self.status = Status.RUNNING

    def unbind(self, slots: SlotTable) -> None:
        if self.row >= 0:
            slots.vacate(self.row)
            self.row = -1
        for row in self.extra_rows:
            slots.vacate(row)
        self.extra_rows = []

    def drop_text(self, buffers: OutputBuffers) -> None:
        if self.text is not None:
            buffers.hand_back(self.text)
            self.text = None

    @property
    def finished(self) -> bool:
        return self.status in (Status.DONE, Status.ABORTED)
