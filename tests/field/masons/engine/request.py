from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from .pages import Node


@dataclass
class Req:
    rid: str
    tokens: List[int]
    node: Optional[Node] = None
    pages: List[int] = field(default_factory=list)
    draft_pages: List[int] = field(default_factory=list)
    new_tokens: int = 0
    limit: int = 16
