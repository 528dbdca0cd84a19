from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import List, Optional


class Phase(enum.Enum):
    QUEUED = 0
    PREFILL = 1
    TRANSFER = 2
    DECODE = 3
    DONE = 4
    FAILED = 5


@dataclass
class ServeRequest:
    rid: str
    input_ids: List[int]
    max_new: int = 128
    phase: Phase = Phase.QUEUED
    pages: List[int] = field(default_factory=list)
    meta_idx: Optional[int] = None
    output: List[int] = field(default_factory=list)

    def pages_needed(self, page_size: int) -> int:
        return -(-len(self.input_ids) // page_size)


@dataclass
class Handoff:
    """What a prefill worker sends: the source pages stay pinned until `acked`."""

    rid: str
    pages: List[int]
    first_token: int
    meta_idx: int
    acked: bool = False
