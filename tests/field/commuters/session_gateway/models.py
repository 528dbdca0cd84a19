from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


@dataclass
class Worker:
    addr: str
    region: str
    load: float = 0.0
    draining: bool = False


@dataclass
class Assignment:
    worker: Worker
    lane: int


@dataclass
class Session:
    sid: str
    region: str
    assignment: Optional[Assignment] = None
    history: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    status: int
    text: str = ""
