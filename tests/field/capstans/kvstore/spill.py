from __future__ import annotations

from typing import Callable

from .pages import PagePool, PagesExhausted
from .tables import Table

CopyPages = Callable[[list[int], list[int]], bool]


class Spiller:
    def __init__(self, device: PagePool, host: PagePool, down: CopyPages, up: CopyPages) -> None:
        self.device = device
        self.host = host
        self.down = down
        self.up = up

    def spill(self, table: Table) -> bool:
        far = self.host.draw_or_none(len(table.pages))  # leak: a failed copy returns False and drops the host pages
        if far is None:
            return False
        if not self.down(table.pages, far):
            return False
        self.device.replenish(table.pages)
        table.pages, table.on_host = far, True
        return True

    def restore(self, table: Table) -> bool:
        near = self.device.draw_or_none(len(table.pages))  # clean: near miss, replenished on a failed copy, else swapped into the table
        if near is None:
            return False
        if not self.up(table.pages, near):
            self.device.replenish(near)
            return False
        near, table.pages = table.pages, near
        table.on_host = False
        self.host.replenish(near)
        return True

    def verify(self, table: Table) -> bool:
        """Round trip through the host tier, to check the copy kernels."""
        far = self.host.draw(len(table.pages))  # leak: PagesExhausted of the device tier leaves the host pages drawn
        near = self.device.draw(len(table.pages))  # clean: replenished in finally
        try:
            return self.down(table.pages, far) and self.up(far, near)
        finally:
            self.device.replenish(near)
            self.host.replenish(far)

    def make_room(self, victims: list[Table], want: int) -> list[int]:
        while victims:
            try:
                return self.device.draw(want)  # clean: handed to the caller, a failed draw takes nothing
            except PagesExhausted:
                if not self.spill(victims[-1]):
                    break
                victims.pop()
        return []
