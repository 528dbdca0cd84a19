from __future__ import annotations

import logging

from .pages import PagePool, TieredPool
from .spill import CopyPages, Spiller
from .tables import Table, TableBook

log = logging.getLogger(__name__)


class Engine:
    def __init__(self, device_pages: int, host_pages: int, down: CopyPages, up: CopyPages) -> None:
        self.device = PagePool("device", device_pages)
        self.host = PagePool("host", host_pages)
        self.tiers = TieredPool(self.device, self.host)
        self.book = TableBook(self.device, page_size=16)
        self.spiller = Spiller(self.device, self.host, down, up)
        self.draft: list[int] = []

    def finish(self, table: Table) -> None:
        if table.on_host:
            self.host.replenish(table.pages)
        self.book.close(table.rid)

    def start_urgent(self, rid: str, pages: int) -> Table | None:
        victims = [t for t in self.book.tables.values() if not t.on_host]
        got = self.spiller.make_room(victims, pages)  # leak: an id in use is turned down after the pages are drawn
        if not got:
            return None
        if rid in self.book.tables:
            log.warning("%s runs already", rid)
            return None
        table = self.book.tables[rid] = Table(rid, got)
        return table

    def reserve_draft(self, pages: int) -> None:
        if self.draft:
            self.device.replenish(self.draft)
            self.draft = []
        self.draft = self.device.draw(pages)  # clean: near miss, the pages held before went back just above

    def close_draft(self) -> None:
        pages, self.draft = self.draft, []
        self.device.replenish(pages)

    def dry_run(self, pages: int, max_host: int) -> int:
        got = self.tiers.draw_mixed(pages, max_host)  # clean: both parts are replenished, or None
        if got is None:
            return -1
        near, far = got
        self.tiers.replenish_mixed(near, far)
        return len(far)
