from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional


@dataclass
class Request:
    rid: str
    tokens: List[int]
    blocks: List[int] = field(default_factory=list)
    draft_block: Optional[int] = None
    finished: bool = False


@dataclass
class ReadView:
    rid: str
    blocks: List[int] = field(default_factory=list)
    owns_blocks: bool = True
