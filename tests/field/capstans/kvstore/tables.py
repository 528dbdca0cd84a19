from __future__ import annotations

from dataclasses import dataclass, field

from .pages import PagePool


@dataclass
class Table:
    rid: str
    pages: list[int] = field(default_factory=list)
    on_host: bool = False


class TableBook:
    def __init__(self, device: PagePool, page_size: int) -> None:
        self.device = device
        self.page_size = page_size
        self.tables: dict[str, Table] = {}

    def open(self, rid: str, tokens: int) -> Table | None:
        if rid in self.tables:
            return None
        pages = self.device.draw_or_none(-(-tokens // self.page_size))  # clean: put in the table, which close() replenishes
        if pages is None:
            return None
        table = self.tables[rid] = Table(rid, pages)
        return table

    def grow(self, rid: str, pages: int) -> bool:
        fresh = self.device.draw_or_none(pages)  # leak: a table that is gone or on the host returns with fresh pages in hand
        if fresh is None:
            return False
        table = self.tables.get(rid)
        if table is None or table.on_host:
            return False
        table.pages.extend(fresh)
        return True

    def close(self, rid: str) -> None:
        table = self.tables.pop(rid, None)
        if table is not None and not table.on_host:
            self.device.replenish(table.pages)

    def checked_out(self) -> int:
        return sum(len(t.pages) for t in self.tables.values() if not t.on_host)
