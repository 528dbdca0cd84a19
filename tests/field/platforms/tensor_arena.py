"""Scratch memory for kernels: a slab allocator, two wrappers around it and workspaces."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence


@dataclass(frozen=True)
class Slab:
    offset: int
    nbytes: int


class SlabAllocator:
    """Size-class allocator over one device arena."""

    ALIGN = 256

    def __init__(self, capacity: int) -> None:
        self._top = 0
        self._capacity = capacity
        self._bins: Dict[int, List[Slab]] = {}

    def alloc(self, nbytes: int) -> Optional[Slab]:
        size = -(-nbytes // self.ALIGN) * self.ALIGN
        bin_ = self._bins.get(size)
        if bin_:
            return bin_.pop()  # clean: returned to the caller
        if self._top + size > self._capacity:
            return None
        slab = Slab(self._top, size)
        self._top += size  # clean: the bytes are those of the slab returned
        return slab

    def dealloc(self, slab: Slab) -> None:
        self._bins.setdefault(slab.nbytes, []).append(slab)


class TrackedAllocator:
    """Remembers which tag holds which slab."""

    def __init__(self, inner: SlabAllocator) -> None:
        self.inner = inner
        self.live: Dict[int, str] = {}

    def alloc(self, nbytes: int, tag: str) -> Optional[Slab]:
        slab = self.inner.alloc(nbytes)  # clean: returned to the caller, with a note of its tag
        if slab is not None:
            self.live[slab.offset] = tag
        return slab

    def dealloc(self, slab: Slab) -> None:
        self.live.pop(slab.offset, None)
        self.inner.dealloc(slab)


class BudgetedAllocator:
    """Soft limit on top of the tracked allocator."""

    def __init__(self, inner: TrackedAllocator, soft_limit: int) -> None:
        self.inner = inner
        self.soft_limit = soft_limit
        self.used = 0

    def alloc(self, nbytes: int, tag: str = "scratch") -> Optional[Slab]:
        slab = self.inner.alloc(nbytes, tag)  # leak: over the soft limit the slab is dropped and None returned
        if slab is None:
            return None
        if self.used + slab.nbytes > self.soft_limit:
            return None
        self.used += slab.nbytes  # clean: the charge goes with the slab that is returned
        return slab

    def dealloc(self, slab: Slab) -> None:
        self.used -= slab.nbytes
        self.inner.dealloc(slab)


class Workspace:
    """A slab that is either allocated here or lent by the caller."""

    def __init__(self, alloc: BudgetedAllocator, nbytes: int, slab: Optional[Slab] = None) -> None:
        self.alloc = alloc
        self.owned = slab is None
        if slab is None:
            slab = alloc.alloc(nbytes)  # clean: near miss, owned is set exactly in this case and close looks at it
        self.slab = slab

    def resize(self, nbytes: int) -> bool:
        if self.slab is not None and self.slab.nbytes >= nbytes:
            return True
        bigger = self.alloc.alloc(nbytes)  # leak: a workspace that was lent its slab stays not owned and close skips the new one
        if bigger is None:
            return False
        if self.owned and self.slab is not None:
            self.alloc.dealloc(self.slab)
        self.slab = bigger
        return True

    def close(self) -> None:
        if self.owned and self.slab is not None:
            self.alloc.dealloc(self.slab)
        self.slab = None


class SplitKWorkspace(Workspace):
    """Adds a reduction buffer for split-K kernels."""

    def __init__(self, alloc: BudgetedAllocator, nbytes: int, splits: int) -> None:
        super().__init__(alloc, nbytes)
        self.partials = alloc.alloc(4 * splits, "partials") if splits > 1 else None  # clean: near miss, close frees it when there is one

    def close(self) -> None:
        if self.partials is not None:
            self.alloc.dealloc(self.partials)
            self.partials = None
        super().close()


class FusedWorkspace(Workspace):
    """Adds one bias buffer for each fused projection."""

    def __init__(self, alloc: BudgetedAllocator, nbytes: int) -> None:
        super().__init__(alloc, nbytes)
        self.biases: Dict[str, Slab] = {}

    def bias(self, name: str, nbytes: int) -> Optional[Slab]:
        if name not in self.biases:
            slab = alloc_or_none(self.alloc, nbytes)  # leak: close clears the table without freeing its slabs
            if slab is None:
                return None
            self.biases[name] = slab
        return self.biases[name]

    def close(self) -> None:
        self.biases.clear()
        super().close()


def alloc_or_none(alloc: BudgetedAllocator, nbytes: int) -> Optional[Slab]:
    return alloc.alloc(nbytes) if nbytes > 0 else None  # clean: returned to the caller


def reduce_rows(alloc: BudgetedAllocator, rows: Sequence[int], reuse: Optional[Slab] = None) -> int:
    slab = reuse if reuse is not None else alloc.alloc(8 * len(rows))  # clean: near miss, freed below just when it was not lent
    if slab is None:
        return 0
    total = sum(rows) + slab.offset
    if reuse is None:
        alloc.dealloc(slab)
    return total


def gather_rows(alloc: BudgetedAllocator, rows: Sequence[int], out: Optional[Slab] = None) -> int:
    owns = out is None and len(rows) > 1
    dest = out
    if out is None:
        dest = alloc.alloc(8 * max(1, len(rows)))  # leak: a single row allocates too but does not set owns
    if dest is None:
        return -1
    last = dest.offset + 8 * len(rows)
    if owns:
        alloc.dealloc(dest)
    return last
