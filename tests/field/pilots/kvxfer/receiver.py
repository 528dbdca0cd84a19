from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Callable, Optional

from .arena import HostArena, Region, RegistrationTable


@dataclass
class Incoming:
    request_id: str
    regions: list[Region] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    failed: bool = False


class KVReceiver:
    def __init__(self, arena: HostArena, table: RegistrationTable, load: Callable[[Region], None]):
        self.arena = arena
        self.table = table
        self.load = load
        self._expected: dict[str, Incoming] = {}
        self._ready: queue.Queue[Incoming] = queue.Queue()

    def expect(self, request_id: str, n: int) -> Optional[list[int]]:
        if request_id in self._expected:
            return self._expected[request_id].keys
        regions = self.arena.carve_many(n)  # clean: near miss, an empty list holds nothing and a full one waits in _expected
        if not regions:
            return None
        inc = Incoming(request_id, regions)
        for region in regions:
            inc.keys.append(self.table.register(region))  # leak: cancel() restores the regions but leaves their keys registered
        self._expected[request_id] = inc
        return inc.keys

    def arrived(self, request_id: str, ok: bool) -> None:
        inc = self._expected.pop(request_id)
        inc.failed = not ok
        self._ready.put(inc)

    def _release(self, inc: Incoming) -> None:
        for key in inc.keys:
            self.table.deregister(key)
        for region in inc.regions:
            self.arena.restore(region)

    def drain(self) -> int:
        loaded = 0
        while not self._ready.empty():
            inc = self._ready.get_nowait()
            if not inc.failed:
                for region in inc.regions:
                    self.load(region)
                loaded += 1
            self._release(inc)
        return loaded

    def cancel(self, request_id: str) -> bool:
        inc = self._expected.pop(request_id, None)
        if inc is None:
            return False
        for region in inc.regions:
            self.arena.restore(region)
        return True

    def pull(self, fill: Callable[[Region], bool], attempts: int) -> bool:
        for _ in range(attempts):
            region = self.arena.carve()  # leak: a failed fill goes on to the next attempt with another region
            if region is None:
                continue
            if fill(region):
                self.load(region)
                self.arena.restore(region)
                return True
        return False

    def pull_once(self, fill: Callable[[Region], bool]) -> bool:
        region = self.arena.carve()  # clean: near miss, restored whatever fill says
        if region is None:
            return False
        ok = fill(region)
        if ok:
            self.load(region)
        self.arena.restore(region)
        return ok
