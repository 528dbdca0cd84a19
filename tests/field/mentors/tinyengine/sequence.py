from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum, auto

_ids = itertools.count()


class SeqStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()
    ABORTED = auto()


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 64
    n: int = 1


@dataclass(eq=False)
class Sequence:
    prompt: list[int]
    params: SamplingParams
    images: list[str] = field(default_factory=list)
    seq_id: int = field(default_factory=lambda: next(_ids))
    output: list[int] = field(default_factory=list)
    status: SeqStatus = SeqStatus.WAITING
    pages: list[int] = field(default_factory=list)
    encoder_keys: list[str] = field(default_factory=list)
    grammar_id: int | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)
