"""Cache of multimodal encoder outputs, shared by requests."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Set


@dataclass
class Entry:
    digest: str
    cells: List[int]
    users: Set[str] = field(default_factory=set)


class CellAllocator:
    def __init__(self, cells: int) -> None:
        self.free_cells: List[int] = list(range(cells))

    def alloc(self, n: int) -> Optional[List[int]]:
        if len(self.free_cells) < n:
            return None
        taken = [self.free_cells.pop() for _ in range(n)]  # clean: pool body, returned to the caller
        return taken

    def alloc_contiguous(self, n: int) -> Optional[List[int]]:
        self.free_cells.sort()
        run: List[int] = []
        for _ in range(len(self.free_cells)):
            cell = self.free_cells.pop(0)  # leak: an interrupted run is started over without returning its cells
            if run and cell != run[-1] + 1:
                run = []
            run.append(cell)
            if len(run) == n:
                return run
        self.free_cells.extend(run)
        return None

    def dealloc(self, cells: List[int]) -> None:
        self.free_cells.extend(cells)


class EncoderCache:
    def __init__(self, alloc: CellAllocator) -> None:
        self.alloc = alloc
        self.entries: Dict[str, Entry] = {}
        self.idle: "OrderedDict[str, Entry]" = OrderedDict()

    def _reclaim(self, n: int) -> None:
        while self.idle and len(self.alloc.free_cells) < n:
            digest, entry = self.idle.popitem(last=False)
            del self.entries[digest]
            self.alloc.dealloc(entry.cells)

    def checkout(self, rid: str, digest: str, size: int) -> Optional[Entry]:
        entry = self.entries.get(digest)
        if entry is None:
            self._reclaim(size)
            cells = self.alloc.alloc(size)  # clean: kept in the entry, given back when it is reclaimed
            if cells is None:
                return None
            entry = self.entries[digest] = Entry(digest, cells)
        self.idle.pop(digest, None)
        entry.users.add(rid)
        return entry

    def checkin(self, rid: str, entry: Entry) -> None:
        entry.users.discard(rid)
        if not entry.users:
            self.idle[entry.digest] = entry

    def reencode(self, digest: str, size: int) -> bool:
        cells = self.alloc.alloc(size)  # leak: returns false for an unknown digest with the new cells in hand
        if cells is None:
            return False
        entry = self.entries.get(digest)
        if entry is None:
            return False
        self.alloc.dealloc(entry.cells)
        entry.cells = cells
        return True

    def widen(self, digest: str, size: int) -> bool:
        entry = self.entries.get(digest)
        if entry is None or len(entry.cells) >= size:
            return False
        cells = self.alloc.alloc(size)  # clean: near miss, the displaced cells are given back
        if cells is None:
            return False
        old, entry.cells = entry.cells, cells
        self.alloc.dealloc(old)
        return True


@dataclass
class MMRequest:
    rid: str
    digests: List[str]
    entries: Dict[str, Entry] = field(default_factory=dict)
    extra: List[Entry] = field(default_factory=list)


class EncoderScheduler:
    def __init__(self, cache: EncoderCache, size_of: Callable[[str], int]) -> None:
        self.cache = cache
        self.size_of = size_of
        self.scheduled: Dict[str, MMRequest] = {}

    def schedule(self, req: MMRequest) -> bool:
        for digest in req.digests:
            if digest in req.entries:
                continue
            entry = self.cache.checkout(req.rid, digest, self.size_of(digest))  # clean: near miss, on failure release() checks in what was gathered
            if entry is None:
                self.release(req)
                return False
            req.entries[digest] = entry
        self.scheduled[req.rid] = req
        return True

    def schedule_extra(self, req: MMRequest, digest: str) -> bool:
        rid = req.rid + "/extra"
        entry = self.cache.checkout(rid, digest, self.size_of(digest))  # leak: release forgets the extra list
        if entry is None:
            return False
        req.extra.append(entry)
        return True

    def release(self, req: MMRequest) -> None:
        for entry in req.entries.values():
            self.cache.checkin(req.rid, entry)
        req.entries.clear()

    def finish(self, rid: str) -> None:
        req = self.scheduled.pop(rid, None)
        if req is not None:
            self.release(req)

    def peek_sizes(self, rid: str, digests: List[str], limit: int) -> List[int]:
        sizes: List[int] = []
        for digest in digests:
            entry = self.cache.checkout(f"{rid}/{digest}", digest, self.size_of(digest))  # leak: break at the limit comes ahead of the checkin
            if entry is None:
                break
            sizes.append(len(entry.cells))
            if sum(sizes) > limit:
                break
            self.cache.checkin(f"{rid}/{digest}", entry)
        return sizes

    def copy_out(self, rid: str, digest: str, read: Callable[[List[int]], bytes]) -> bytes:
        entry = self.cache.checkout(rid + "/copy", digest, self.size_of(digest))  # clean: checked in by finally
        if entry is None:
            return b""
        try:
            return read(entry.cells)
        finally:
            self.cache.checkin(rid + "/copy", entry)
