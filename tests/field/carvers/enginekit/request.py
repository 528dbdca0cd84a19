from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import List, Optional

from .slots import Row, RowTable, TokenPool


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False)
class GenRequest:
    rid: str
    prompt: List[int]
    max_new: int = 4
    state: State = State.WAITING
    row: Optional[Row] = None
    kv: List[int] = field(default_factory=list)
    output: List[int] = field(default_factory=list)

    def attach(self, row: Row, kv: List[int]) -> None:
        self.row = row
        self.kv.extend(kv)
        self.state = State.RUNNING

    def detach(self, rows: RowTable, tokens: TokenPool) -> None:
        if self.row is not None:
            rows.surrender(self.row)
            self.row = None
        if self.kv:
            tokens.free(self.kv)
            self.kv = []
        self.state = State.DONE

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_new
