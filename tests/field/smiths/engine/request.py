from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from .blocks import BlockManager, SlotTable


@dataclass(eq=False)
class Request:
    rid: str
    prompt: List[int]
    max_new: int = 4
    prefill_only: bool = False
    output: List[int] = field(default_factory=list)
    blocks: List[int] = field(default_factory=list)
    draft_blocks: List[int] = field(default_factory=list)
    row: int = -1

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def needs_row(self) -> bool:
        return not self.prefill_only

    def finish(self, mgr: BlockManager, slots: SlotTable) -> None:
        if self.blocks:
            mgr.deallocate(self.blocks)
            self.blocks = []
        if self.draft_blocks:
            mgr.deallocate(self.draft_blocks)
            self.draft_blocks = []
        if self.row >= 0:
            slots.vacate(self.row)
            self.row = -1
