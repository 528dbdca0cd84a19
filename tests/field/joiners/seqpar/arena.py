from __future__ import annotations

from typing import Dict, List, Optional


class Region:
    __slots__ = ("offset", "size", "view")

    def __init__(self, offset: int, size: int, view: memoryview):
        self.offset = offset
        self.size = size
        self.view = view


class Arena:
    """First-fit regions in one block of device memory."""

    def __init__(self, size: int):
        self.size = size
        self._mem = memoryview(bytearray(size))
        self._used: Dict[int, int] = {}

    def carve(self, n: int) -> Optional[Region]:
        at = 0
        for off in sorted(self._used):
            if off - at >= n:
                break
            at = off + self._used[off]
        if at + n > self.size:
            return None
        self._used[at] = n
        return Region(at, n, self._mem[at:at + n])

    def uncarve(self, r: Region) -> None:
        del self._used[r.offset]

    @property
    def used(self) -> int:
        return sum(self._used.values())


class Workspace:
    """Named scratch on top of the arena; at most one region per name."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self.named: Dict[str, Region] = {}
        self.temps: List[Region] = []

    def scratch(self, n: int) -> Region:
        r = self.arena.carve(n)  # clean: handed on, or there is none
        if r is None:
            raise MemoryError(f"workspace: {n} bytes of {self.arena.size}")
        return r

    def done(self, r: Region) -> None:
        self.arena.uncarve(r)

    def temp(self, n: int) -> Region:
        """Given up at the end of the step."""
        r = self.scratch(n)  # clean: near miss, listed in temps, end_step gives it up
        self.temps.append(r)
        return r

    def end_step(self) -> None:
        for r in self.temps:
            self.done(r)
        self.temps = []

    def name(self, key: str, n: int) -> Region:
        old = self.named.get(key)
        if old is not None and old.size >= n:
            return old
        r = self.scratch(n)  # leak: a region under key that was too small is overwritten
        self.named[key] = r
        return r

    def rename(self, old: str, new: str) -> None:
        prior = self.named.pop(new, None)
        if prior is not None:
            self.done(prior)
        self.named[new] = self.named.pop(old)

    def close(self) -> None:
        self.end_step()
        for r in self.named.values():
            self.done(r)
        self.named.clear()
