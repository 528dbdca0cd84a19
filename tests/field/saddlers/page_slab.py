"""Small-object slabs on top of device pages: a pool that lives on another pool."""
from __future__ import annotations

from typing import Dict, List, Optional


class PageSource:
    def __init__(self, pages: int) -> None:
        self._pages = list(range(pages))
        self.taken = 0

    def grab_page(self) -> Optional[int]:
        if not self._pages:
            return None
        self.taken += 1
        return self._pages.pop()

    def drop_page(self, page: int) -> None:
        self.taken -= 1
        self._pages.append(page)


class Slab:
    def __init__(self, page: int, cells: int) -> None:
        self.page = page
        self.cells = cells
        self.free = list(range(cells))

    @property
    def empty(self) -> bool:
        return len(self.free) == self.cells


class Cell:
    __slots__ = ("slab", "index")

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab = slab
        self.index = index


class SlabPool:
    """Cells from slabs; an empty slab gives its page back to the source."""

    def __init__(self, source: PageSource, cells: int = 4, reserve: int = 1) -> None:
        self.source = source
        self.cells = cells
        self.slabs: List[Slab] = []
        self.spare: List[int] = []
        for _ in range(reserve):
            page = source.grab_page()  # clean: the spare list is given back by shutdown
            if page is not None:
                self.spare.append(page)

    def _new_slab(self) -> Optional[Slab]:
        page = self.spare.pop() if self.spare else self.source.grab_page()  # clean: near miss, the slab owns the page until release_cell or shutdown
        if page is None:
            return None
        slab = Slab(page, self.cells)
        self.slabs.append(slab)
        return slab

    def get_cell(self) -> Optional[Cell]:
        for slab in self.slabs:
            if slab.free:
                return Cell(slab, slab.free.pop())
        slab = self._new_slab()  # clean: slabs owns it until its last cell is released
        if slab is None:
            return None
        return Cell(slab, slab.free.pop())

    def release_cell(self, cell: Cell) -> None:
        cell.slab.free.append(cell.index)
        if cell.slab.empty:
            self.slabs.remove(cell.slab)
            self.source.drop_page(cell.slab.page)

    def shutdown(self) -> None:
        for slab in self.slabs:
            self.source.drop_page(slab.page)
        self.slabs.clear()
        while self.spare:
            self.source.drop_page(self.spare.pop())


class LargePool:
    """Runs of whole pages."""

    def __init__(self, source: PageSource, keep: int = 2) -> None:
        self.source = source
        self.keep = keep
        self.cache: Dict[int, List[List[int]]] = {}

    def get_run(self, n: int) -> Optional[List[int]]:
        cached = self.cache.get(n)
        if cached:
            return cached.pop()
        run: List[int] = []
        while len(run) < n:
            page = self.source.grab_page()  # leak: put_run cuts a full cache and drops the run's pages
            if page is None:
                for p in run:
                    self.source.drop_page(p)
                return None
            run.append(page)
        return run

    def put_run(self, run: List[int]) -> None:
        bucket = self.cache.setdefault(len(run), [])
        bucket.append(run)
        if len(bucket) > self.keep:
            bucket.pop(0)

    def trim(self) -> None:
        for bucket in self.cache.values():
            for run in bucket:
                for page in run:
                    self.source.drop_page(page)
        self.cache.clear()


class BiasTable:
    """Logit-bias rows of running requests, one cell each."""

    def __init__(self, pool: SlabPool, large: LargePool) -> None:
        self.pool = pool
        self.large = large
        self.rows: Dict[str, Cell] = {}

    def add(self, rid: str) -> bool:
        cell = self.pool.get_cell()  # leak: a request that has a row already returns True and the new cell is dropped
        if cell is None:
            return False
        if rid in self.rows:
            return True
        self.rows[rid] = cell
        return True

    def replace(self, rid: str) -> bool:
        cell = self.pool.get_cell()  # clean: stored, the former cell is released
        if cell is None:
            return False
        former = self.rows.pop(rid, None)
        self.rows[rid] = cell
        if former is not None:
            self.pool.release_cell(former)
        return True

    def remove(self, rid: str) -> None:
        cell = self.rows.pop(rid, None)
        if cell is not None:
            self.pool.release_cell(cell)

    def rebuild(self, pages: int) -> bool:
        run = self.large.get_run(pages)  # leak: without a cell for the header the run is not put back
        if run is None:
            return False
        header = self.pool.get_cell()  # clean: released below
        if header is None:
            return False
        self.pool.release_cell(header)
        self.large.put_run(run)
        return True

    def measure(self, pages: int) -> int:
        run = self.large.get_run(pages)  # clean: put back unless None
        if run is None:
            return 0
        span = max(run) - min(run) + 1
        self.large.put_run(run)
        return span


def main() -> None:
    source = PageSource(16)
    pool, large = SlabPool(source), LargePool(source)  # clean: shutdown gives the spare pages back
    table = BiasTable(pool, large)
    for i in range(6):
        table.add(f"r{i}")
    table.replace("r1")
    for i in range(6):
        table.remove(f"r{i}")
    table.rebuild(3)
    table.measure(2)
    large.trim()
    pool.shutdown()
    assert source.taken == 0


if __name__ == "__main__":
    main()
