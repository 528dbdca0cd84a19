"""Symmetric-memory workspaces for overlapped tensor-parallel matmuls.

Layers: WorkspaceArena hands out pages, Workspace groups pages into a region,
TensorParallelContext gives regions to the operators.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

PAGE = 64


class OutOfPages(RuntimeError):
    pass


class WorkspaceArena:
    def __init__(self, pages: int) -> None:
        self._state = bytearray(pages)
        self._hint = 0

    def map_pages(self, count: int) -> range:
        n = len(self._state)
        for start in range(n - count + 1):
            if not any(self._state[start: start + count]):
                self._state[start: start + count] = b"\x01" * count
                return range(start, start + count)
        raise OutOfPages(f"{count} pages")

    def unmap_pages(self, pages: range) -> None:
        for p in pages:
            self._state[p] = 0

    def mapped(self) -> int:
        return sum(self._state)


class Region:
    """Pages with an owner flag: borrowed regions belong to someone else."""

    def __init__(self, arena: WorkspaceArena, pages: range, owned: bool = True) -> None:
        self.arena = arena
        self.pages = pages
        self.owned = owned

    def borrow(self) -> "Region":
        return Region(self.arena, self.pages, owned=False)

    def dispose(self) -> None:
        if self.owned:
            self.arena.unmap_pages(self.pages)
            self.owned = False

    def detach(self) -> range:
        """The caller takes over the pages."""
        self.owned = False
        return self.pages


def make_region(arena: WorkspaceArena, nbytes: int) -> Region:
    return Region(arena, arena.map_pages(-(-nbytes // PAGE)))  # clean: owned by the region that is returned


def make_region_or_none(arena: WorkspaceArena, nbytes: int) -> Optional[Region]:
    try:
        return make_region(arena, nbytes)  # clean: returned to the caller
    except OutOfPages:
        return None


class TensorParallelContext:
    def __init__(self, arena: WorkspaceArena) -> None:
        self.arena = arena
        self._cached: Optional[Region] = None
        self._named: Dict[str, Region] = {}
        self._raw: Dict[str, range] = {}

    def workspace(self, nbytes: int) -> Optional[Region]:
        """A region for one operator: borrowed from the cache if it is large enough."""
        if self._cached is not None and len(self._cached.pages) * PAGE >= nbytes:
            return self._cached.borrow()
        return make_region_or_none(self.arena, nbytes)  # clean: returned to the caller

    def warm(self, nbytes: int) -> bool:
        fresh = make_region_or_none(self.arena, nbytes)  # clean: near miss, the cached one is disposed before it is replaced
        if fresh is None:
            return False
        if self._cached is not None:
            self._cached.dispose()
        self._cached = fresh
        return True

    def all_gather_matmul(self, nbytes: int, fn: Callable[[range], int]) -> int:
        ws = self.workspace(nbytes)  # clean: near miss, dispose() knows from its flag whether there is anything to unmap
        if ws is None:
            return 0
        try:
            return fn(ws.pages)
        finally:
            ws.dispose()

    def reduce_scatter(self, nbytes: int, fn: Callable[[range], Optional[int]]) -> int:
        ws = self.workspace(nbytes)  # leak: a kernel that gives None returns zero before dispose
        if ws is None:
            return 0
        result = fn(ws.pages)
        if result is None:
            return 0
        ws.dispose()
        return result

    def named(self, name: str, nbytes: int) -> Optional[Region]:
        """A region that lives until drop(name); larger requests replace it."""
        old = self._named.get(name)
        if old is not None and len(old.pages) * PAGE >= nbytes:
            return old
        region = make_region_or_none(self.arena, nbytes)  # leak: the smaller region of the name is overwritten and not disposed
        if region is not None:
            self._named[name] = region
        return region

    def drop(self, name: str) -> None:
        region = self._named.pop(name, None)
        if region is not None:
            region.dispose()

    def pin_raw(self, name: str, nbytes: int) -> bool:
        if name in self._raw:
            return True
        region = make_region_or_none(self.arena, nbytes)  # clean: near miss, detached into the raw table, unpin_raw unmaps the pages
        if region is None:
            return False
        self._raw[name] = region.detach()
        return True

    def unpin_raw(self, name: str) -> None:
        pages = self._raw.pop(name, None)
        if pages is not None:
            self.arena.unmap_pages(pages)

    def page_addresses(self, nbytes: int) -> List[int]:
        region = make_region(self.arena, nbytes)  # leak: detached, so dispose does nothing, and the pages are only listed
        addresses = [p * PAGE for p in region.detach()]
        region.dispose()
        return addresses

    def exchange(self, sizes: Sequence[int]) -> int:
        regions: List[Region] = []
        total = 0
        for nbytes in sizes:
            region = self.workspace(nbytes)  # clean: near miss, collected, and all are disposed after the loop, break or not
            if region is None:
                break
            regions.append(region)
            total += len(region.pages)
        for region in regions:
            region.dispose()
        return total

    def close(self) -> None:
        for name in list(self._named):
            self.drop(name)
        for name in list(self._raw):
            self.unpin_raw(name)
        if self._cached is not None:
            self._cached.dispose()
            self._cached = None


class OverlapScope:
    """Send and receive workspaces for one overlapped operator."""

    def __init__(self, ctx: TensorParallelContext, nbytes: int) -> None:
        self.ctx = ctx
        self.nbytes = nbytes
        self.send: Optional[Region] = None
        self.recv: Optional[Region] = None

    def __enter__(self) -> "OverlapScope":
        self.send = self.ctx.workspace(self.nbytes)  # clean: disposed in __exit__ before anything else
        self.recv = make_region_or_none(self.ctx.arena, self.nbytes // 2)  # leak: __exit__ returns before it is disposed when there was no send region
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.send is None:
            return
        self.send.dispose()
        if self.recv is not None:
            self.recv.dispose()


def overlapped(ctx: TensorParallelContext, nbytes: int, fn: Callable[[Region, Region], int]) -> int:
    with OverlapScope(ctx, nbytes) as scope:
        if scope.send is None or scope.recv is None:
            return 0
        return fn(scope.send, scope.recv)
