from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


@dataclass
class Request:
    rid: str
    prompt: list[int]
    max_tokens: int = 16
    slot: Optional[int] = None
    cancelled: bool = False
    output: list[int] = field(default_factory=list)

    def attach(self, slot: int) -> None:
        self.slot = slot

    def detach(self) -> Optional[int]:
        slot, self.slot = self.slot, None
        return slot

    @property
    def finished(self) -> bool:
        return self.cancelled or len(self.output) >= self.max_tokens
