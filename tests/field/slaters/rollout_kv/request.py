from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional


@dataclass
class Rollout:
    rid: int
    tokens: List[int]
    max_new: int
    adapter: Optional[str] = None
    blocks: List[int] = field(default_factory=list)
    generated: int = 0
    adapter_pinned: bool = False

    @property
    def finished(self) -> bool:
        return self.generated >= self.max_new
