from __future__ import annotations

from typing import List, Optional

from .prefix import Node


class Sequence:
    def __init__(self, sid: int, tokens: List[int]) -> None:
        self.sid = sid
        self.tokens = tokens
        self.node: Optional[Node] = None
        self.pages: List[int] = []
        self.done = False
