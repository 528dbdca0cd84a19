"""Two-tier slab arena behind the multimodal feature store: slabs are cut into cells."""
from __future__ import annotations

import threading
from collections import deque
from typing import Deque, Iterable, Optional


class Slab:
    def __init__(self, slab_id: int, cells: int) -> None:
        self.slab_id = slab_id
        self.cells: Deque[int] = deque(range(cells))
        self.total = cells
        self.retired = False

    @property
    def whole(self) -> bool:
        return len(self.cells) == self.total


class SlabSource:
    """Device memory; a slab is obtained and relinquished as a whole."""

    def __init__(self, slabs: int, cells: int) -> None:
        self._ids = list(range(slabs))
        self.cells = cells

    def obtain(self) -> Optional[Slab]:
        if not self._ids:
            return None
        return Slab(self._ids.pop(), self.cells)

    def relinquish(self, slab: Slab) -> None:
        self._ids.append(slab.slab_id)

    @property
    def left(self) -> int:
        return len(self._ids)


class Cell:
    __slots__ = ("slab", "index", "payload")

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab = slab
        self.index = index
        self.payload: bytes = b""


class Arena:
    def __init__(self, source: SlabSource, keep: int = 1) -> None:
        self.source = source
        self.keep = keep
        self._slabs: list[Slab] = []
        self._lock = threading.RLock()
        self.live = 0

    def checkout_cell(self) -> Optional[Cell]:
        with self._lock:
            for slab in self._slabs:
                if slab.cells and not slab.retired:
                    self.live += 1
                    return Cell(slab, slab.cells.popleft())
            slab = self.source.obtain()  # clean: joins the arena's slabs, trim relinquishes
            if slab is None:
                return None
            self._slabs.append(slab)
            self.live += 1
            return Cell(slab, slab.cells.popleft())

    def checkin_cell(self, cell: Cell) -> None:
        with self._lock:
            cell.slab.cells.append(cell.index)
            cell.payload = b""
            self.live -= 1

    def checkout_run(self, n: int) -> list[Cell]:
        """n cells of one slab, or nothing."""
        with self._lock:
            run: list[Cell] = []
            for _ in range(n):
                cell = self.checkout_cell()  # leak: a change of slab returns the empty list with the run in hand
                if cell is None:
                    break
                if run and cell.slab is not run[0].slab:
                    self.checkin_cell(cell)
                    return []
                run.append(cell)
            if len(run) < n:
                for cell in run:
                    self.checkin_cell(cell)
                return []
            return run

    def checkout_upto(self, n: int) -> list[Cell]:
        cells: list[Cell] = []
        while len(cells) < n:
            cell = self.checkout_cell()  # clean: near miss, the short list is a valid result and the caller's
            if cell is None:
                break
            cells.append(cell)
        return cells

    def replace(self, cell: Cell) -> Optional[Cell]:
        """A cell in another slab that takes over the payload; the old one is checked in."""
        fresh = self.checkout_cell()  # clean: near miss, checked in again when it is of the same slab
        if fresh is None:
            return None
        if fresh.slab is cell.slab:
            self.checkin_cell(fresh)
            return None
        fresh.payload = cell.payload
        self.checkin_cell(cell)
        return fresh

    def evacuate(self, slab: Slab, cells: Iterable[Cell]) -> list[Cell]:
        """Moves the cells of a slab that is to be retired."""
        moved: list[Cell] = []
        slab.retired = True
        for cell in cells:
            if cell.slab is not slab:
                moved.append(cell)
                continue
            fresh = self.checkout_cell()  # leak: an empty cell is checked in but its substitute is not kept
            if fresh is None:
                moved.append(cell)
                continue
            if cell.payload:
                fresh.payload = cell.payload
                moved.append(fresh)
            self.checkin_cell(cell)
        return moved

    def trim(self) -> int:
        with self._lock:
            whole = [s for s in self._slabs if s.whole]
            for slab in whole[self.keep :]:
                self._slabs.remove(slab)
                self.source.relinquish(slab)
            return max(0, len(whole) - self.keep)

    def prewarm(self, slabs: int) -> int:
        added = 0
        with self._lock:
            for _ in range(slabs):
                slab = self.source.obtain()  # clean: joins the arena's slabs
                if slab is None:
                    break
                self._slabs.append(slab)
                added += 1
        return added

    def prewarm_even(self, slabs: int) -> int:
        """Slabs with an even id share a memory channel with the encoder; leave those out."""
        added = 0
        with self._lock:
            while added < slabs:
                slab = self.source.obtain()  # leak: an even slab continues, neither kept nor relinquished
                if slab is None:
                    break
                if slab.slab_id % 2 == 0:
                    continue
                self._slabs.append(slab)
                added += 1
        return added

    def close(self) -> None:
        with self._lock:
            while self._slabs:
                self.source.relinquish(self._slabs.pop())


class BorrowingArena:
    """Takes cells of a neighbour when its own arena has none left."""

    def __init__(self, own: Arena, neighbour: Arena) -> None:
        self.own = own
        self.neighbour = neighbour
        self._foreign: set[int] = set()

    def checkout_cell(self) -> Optional[Cell]:
        cell = self.own.checkout_cell()  # clean: returned
        if cell is None:
            cell = self.neighbour.checkout_cell()  # clean: near miss, returned and remembered as foreign
            if cell is not None:
                self._foreign.add(id(cell))
        return cell

    def checkin_cell(self, cell: Cell) -> None:
        if id(cell) in self._foreign:
            self._foreign.discard(id(cell))
            self.neighbour.checkin_cell(cell)
        else:
            self.own.checkin_cell(cell)


class CellCache:
    """Thread-local magazine in front of the arena."""

    def __init__(self, arena: Arena, depth: int) -> None:
        self.arena = arena
        self.depth = depth
        self._magazine: list[Cell] = []

    def get_cell(self) -> Optional[Cell]:
        if self._magazine:
            return self._magazine.pop()
        return self.arena.checkout_cell()  # clean: handed to the caller

    def put_cell(self, cell: Cell) -> None:
        if len(self._magazine) < self.depth:
            self._magazine.append(cell)
        else:
            self.arena.checkin_cell(cell)

    def refill(self) -> int:
        """Tops the magazine up to its depth."""
        want = self.depth - len(self._magazine)
        got = self.arena.checkout_upto(want)  # clean: joins the magazine, flush checks in
        self._magazine.extend(got)
        return len(got)

    def reload(self) -> int:
        """Swaps the magazine for cells of one slab."""
        run = self.arena.checkout_run(self.depth)  # clean: near miss, the old magazine is flushed before it is replaced
        if not run:
            return 0
        self.flush()
        self._magazine = run
        return len(run)

    def flush(self) -> None:
        for cell in self._magazine:
            self.arena.checkin_cell(cell)
        self._magazine = []


class FeatureStore:
    def __init__(self, cache: CellCache) -> None:
        self.cache = cache
        self._by_key: dict[str, Cell] = {}

    def put(self, key: str, payload: bytes) -> bool:
        cell = self.cache.get_cell()  # clean: near miss, the value it displaces is put back first
        if cell is None:
            return False
        cell.payload = payload
        old = self._by_key.pop(key, None)
        if old is not None:
            self.cache.put_cell(old)
        self._by_key[key] = cell
        return True

    def delete(self, key: str) -> None:
        cell = self._by_key.pop(key, None)
        if cell is not None:
            self.cache.put_cell(cell)

    def roundtrip(self, payload: bytes) -> bytes:
        cell = self.cache.get_cell()  # leak: the payload is returned, the cell is not put back
        if cell is None:
            return payload
        cell.payload = payload
        return bytes(cell.payload)


def main() -> None:
    source = SlabSource(3, 4)
    arena = Arena(source, keep=0)
    cache = CellCache(arena, 2)
    store = FeatureStore(cache)
    store.put("a", b"1")
    store.put("a", b"2")
    store.delete("a")
    cache.refill()
    cache.reload()
    cache.flush()
    both = BorrowingArena(arena, Arena(source))
    cell = both.checkout_cell()  # clean: checked in below
    if cell is not None:
        both.checkin_cell(cell)
    arena.trim()
    print("live", arena.live, "slabs left", source.left)


if __name__ == "__main__":
    main()
