"""A tablet: its extents, a write buffer that may be borrowed, and snapshots."""
from typing import Callable, Dict, List, Optional

from .blocks import Extent, FreeMap, Reserve


class Tablet:
    def __init__(self, name: str, freemap: FreeMap, reserve: Reserve) -> None:
        self.name = name
        self.freemap = freemap
        self.reserve = reserve
        self.extents: List[Extent] = []
        self.meta_block: Optional[int] = None
        self.meta_borrowed = False

    def new_extent(self) -> Extent:
        ext = Extent(self.freemap)
        self.extents.append(ext)
        return ext

    def attach_meta(self, block: Optional[int] = None) -> bool:
        """Takes a block of its own unless the caller lends one."""
        if self.meta_block is not None:
            return True
        if block is not None:
            self.meta_block, self.meta_borrowed = block, True
            return True
        self.meta_block = self.freemap.allocate()  # clean: near miss, detach_meta() frees its own
        self.meta_borrowed = False
        return self.meta_block is not None

    def detach_meta(self) -> None:
        if self.meta_block is not None and not self.meta_borrowed:
            self.freemap.deallocate(self.meta_block)
        self.meta_block = None

    def checkpoint(self, write: Callable[[int, bytes], bool]) -> bool:
        block = self.reserve.draw()  # leak: a failed write returns without refill()
        if block is None:
            return False
        body = b",".join(str(b).encode() for e in self.extents for b in e.blocks)
        if not write(block, body):
            return False
        self.reserve.refill(block)
        return True

    def trial_checkpoint(self, write: Callable[[int, bytes], bool]) -> bool:
        block = self.reserve.draw()  # clean: refilled on the only way on
        if block is None:
            return False
        done = write(block, b"trial")
        self.reserve.refill(block)
        return done

    def drop(self) -> None:
        for ext in self.extents:
            ext.free()
        self.extents.clear()
        self.detach_meta()


class TabletMap:
    """Open tablets with a count of the requests inside each."""

    def __init__(self) -> None:
        self._tablets: Dict[str, Tablet] = {}
        self._inside: Dict[str, int] = {}

    def add(self, tablet: Tablet) -> None:
        self._tablets[tablet.name] = tablet
        self._inside[tablet.name] = 0

    def hold(self, name: str) -> Optional[Tablet]:
        tablet = self._tablets.get(name)
        if tablet is not None:
            self._inside[name] += 1
        return tablet

    def let_go(self, tablet: Tablet) -> None:
        self._inside[tablet.name] -= 1

    def unload(self, name: str) -> bool:
        if self._inside.get(name, 0):
            return False
        tablet = self._tablets.pop(name, None)
        if tablet is None:
            return False
        del self._inside[name]
        tablet.drop()
        return True
