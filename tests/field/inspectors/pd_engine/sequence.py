"""Decode-side sequence state."""
from dataclasses import dataclass, field
from typing import Optional

from .pages import PageTable, ReceiveSlots


@dataclass(eq=False)
class Sequence:
    rid: str
    length: int
    pages: list[int] = field(default_factory=list)
    slot: Optional[int] = None

    def inherit(self, parent: "Sequence", table: PageTable) -> None:
        self.pages = [table.bump(page) for page in parent.pages]  # clean: near miss, scrap() puts every bumped page

    def borrow_tail(self, other: "Sequence", table: PageTable) -> int:
        page = table.bump(other.pages[-1])  # leak: bumped for a look, never put back
        return hash((page, other.length))

    def scrap(self, table: PageTable, slots: ReceiveSlots) -> None:
        table.put_pages(self.pages)
        self.pages.clear()
        if self.slot is not None:
            slots.deregister(self.slot)
            self.slot = None
