from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Optional

from .resources import Grammar


class Stage(enum.Enum):
    QUEUED = enum.auto()
    ACTIVE = enum.auto()
    PAUSED = enum.auto()
    CLOSED = enum.auto()


@dataclass
class EngineRequest:
    req_id: str
    tokens: list[int]
    images: int = 0
    schema: Optional[str] = None
    stage: Stage = Stage.QUEUED
    row: Optional[int] = None
    grammar: Optional[Grammar] = None
    output: list[int] = field(default_factory=list)
