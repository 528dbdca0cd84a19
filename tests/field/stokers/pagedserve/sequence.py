from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import List, Optional


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


@dataclass
class Sequence:
    ident: str
    tokens: List[int]
    has_image: bool = False
    max_tokens: int = 256
    status: Status = Status.WAITING
    blocks: List[int] = field(default_factory=list)
    draft_blocks: List[int] = field(default_factory=list)
    encoder_slot: Optional[int] = None
    prompt_len: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    def block_hashes(self, size: int) -> List[int]:
        full = len(self.tokens) // size
        return [hash(tuple(self.tokens[: (i + 1) * size])) for i in range(full)]

    def blocks_needed(self, size: int) -> int:
        return -(-len(self.tokens) // size)

    @property
    def exhausted(self) -> bool:
        return len(self.tokens) - self.prompt_len >= self.max_tokens
