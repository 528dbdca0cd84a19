"""Page-table locks and reader counts for migrations between tiers."""
from __future__ import annotations

import threading
from typing import Dict, Iterable, List, Optional


class PageEntry:
    def __init__(self, pid: int, tier: str) -> None:
        self.pid = pid
        self.tier = tier
        self.lock = threading.Lock()
        self.readers = 0
        self.dead = False


class PageTable:
    """`incref` keeps a page in its tier, `decref` lets it move again."""

    def __init__(self) -> None:
        self._mu = threading.RLock()
        self._pages: Dict[int, PageEntry] = {}

    def add(self, pid: int, tier: str = "hbm") -> PageEntry:
        with self._mu:
            return self._pages.setdefault(pid, PageEntry(pid, tier))

    def find(self, pid: int) -> Optional[PageEntry]:
        return self._pages.get(pid)

    def incref(self, pid: int) -> Optional[PageEntry]:
        with self._mu:
            e = self._pages.get(pid)
            if e is None or e.dead:
                return None
            e.readers += 1
            return e

    def decref(self, e: PageEntry) -> None:
        with self._mu:
            e.readers -= 1

    def size(self) -> int:
        self._mu.acquire()  # clean: released in the finally
        try:
            return len(self._pages)
        finally:
            self._mu.release()

    def remove(self, pid: int) -> bool:
        self._mu.acquire()  # leak: an unknown page returns with the table locked
        e = self._pages.get(pid)
        if e is None:
            return False
        e.dead = True
        del self._pages[pid]
        self._mu.release()
        return True


class Migrator:
    def __init__(self, table: PageTable, tiers: List[str]) -> None:
        self.table = table
        self.tiers = tiers
        self.busy = 0

    def try_move(self, pid: int, tier: str) -> bool:
        e = self.table.find(pid)
        if e is None:
            return False
        if not e.lock.acquire(blocking=False):  # clean: near miss, the early return is the way on which it was not taken
            self.busy += 1
            return False
        try:
            if e.readers:
                return False
            e.tier = tier
            return True
        finally:
            e.lock.release()

    def move_all(self, pids: Iterable[int], tier: str) -> int:
        moved = 0
        for pid in pids:
            e = self.table.find(pid)
            if e is None or not e.lock.acquire(timeout=0.01):  # leak: a page that is being read is skipped by `continue` with its lock held
                continue
            if e.readers:
                continue
            e.tier = tier
            e.lock.release()
            moved += 1
        return moved

    def swap(self, a: int, b: int) -> bool:
        ea, eb = self.table.find(a), self.table.find(b)
        if ea is None or eb is None or ea is eb:
            return False
        lo, hi = (ea, eb) if ea.pid < eb.pid else (eb, ea)
        lo.lock.acquire()  # leak: when the second lock cannot be had in time the first stays taken
        if not hi.lock.acquire(timeout=0.01):  # clean: released with the first
            return False
        lo.tier, hi.tier = hi.tier, lo.tier
        hi.lock.release()
        lo.lock.release()
        return True

    def read(self, pid: int, out: List[str]) -> bool:
        e = self.table.incref(pid)  # clean: the finally lowers it
        if e is None:
            return False
        try:
            if e.tier not in self.tiers:
                return False
            out.append(e.tier)
            return True
        finally:
            self.table.decref(e)

    def locate(self, pids: Iterable[int], tier: str) -> Optional[int]:
        """First page of the list that lives in `tier`."""
        for pid in pids:
            e = self.table.incref(pid)  # leak: the match is returned as a number without decref
            if e is None:
                continue
            if e.tier == tier:
                return pid
            self.table.decref(e)
        return None

    def hold(self, pids: Iterable[int]) -> List[PageEntry]:
        """Referenced entries; `unhold` lowers them."""
        held = []
        for pid in pids:
            e = self.table.incref(pid)  # clean: returned in the list
            if e is not None:
                held.append(e)
        return held

    def unhold(self, held: List[PageEntry]) -> None:
        for e in held:
            self.table.decref(e)

    def all_resident(self, pids: List[int]) -> bool:
        held = self.hold(pids)  # clean: near miss, unhold runs before the comparison is returned
        ok = len(held) == len(pids) and all(e.tier == "hbm" for e in held)
        self.unhold(held)
        return ok
