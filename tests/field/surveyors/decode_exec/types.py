from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Optional


class RequestState(enum.Enum):
    QUEUED = "queued"
    CONTEXT = "context"
    GENERATION = "generation"
    TRANSFER = "transfer"
    DONE = "done"


@dataclass
class LlmRequest:
    request_id: int
    tokens: list[int]
    max_new_tokens: int
    state: RequestState = RequestState.QUEUED
    seq_slot: Optional[int] = None
    draft_slot: Optional[int] = None
    pages: list[int] = field(default_factory=list)
