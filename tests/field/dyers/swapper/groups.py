from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional


@dataclass
class Group:
    gid: str
    gpu: List[int] = field(default_factory=list)
    cpu: List[int] = field(default_factory=list)
    state: str = "running"

    def swap_tables(self, gpu: List[int], cpu: List[int]) -> None:
        self.gpu, self.cpu = gpu, cpu


@dataclass
class Plan:
    moves: List[tuple]
    group: Optional[Group] = None
