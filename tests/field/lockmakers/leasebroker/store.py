"""Rows of free devices, kept in order of use."""
from __future__ import annotations

import threading
from collections import OrderedDict


class LeaseStore:
    def __init__(self, hosts: dict[str, int]):
        self._rows: OrderedDict[tuple[str, int], float] = OrderedDict()
        for host, n in hosts.items():
            for i in range(n):
                self._rows[(host, i)] = 0.0
        self.mutex = threading.Lock()

    def pick(self) -> tuple[str, int] | None:
        with self.mutex:
            if not self._rows:
                return None
            row, _ = self._rows.popitem(last=False)  # clean: returned to the caller
            return row

    def pick_on(self, host: str) -> tuple[str, int] | None:
        with self.mutex:
            for row in self._rows:
                if row[0] == host:
                    del self._rows[row]
                    return row
        return None

    def shelve(self, row: tuple[str, int], load: float = 0.0) -> None:
        with self.mutex:
            self._rows[row] = load
