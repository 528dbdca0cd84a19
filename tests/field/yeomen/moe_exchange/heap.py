"""Symmetric heap: the same offsets on every rank, for one-sided puts."""
from typing import Dict, List, Optional

import torch


class HeapFull(MemoryError):
    pass


class Slab:
    __slots__ = ("heap", "offset", "order", "owner")

    def __init__(self, heap: "SymmetricHeap", offset: int, order: int, owner: str) -> None:
        self.heap, self.offset, self.order, self.owner = heap, offset, order, owner

    def as_tensor(self, shape, dtype) -> torch.Tensor:
        n = 1 << self.order
        raw = self.heap.base[self.offset:self.offset + n]
        count = torch.Size(shape).numel()
        return raw.view(dtype)[:count].view(shape)

    def free(self) -> None:
        self.heap.free(self)


class SymmetricHeap:
    """Buddy allocator."""

    def __init__(self, base: torch.Tensor, min_order: int = 12) -> None:
        self.base = base
        self.min_order = min_order
        self.max_order = base.numel().bit_length() - 1
        self._lists: Dict[int, List[int]] = {o: [] for o in range(min_order, self.max_order + 1)}
        self._lists[self.max_order].append(0)

    def alloc(self, nbytes: int, owner: str = "?") -> Slab:
        order = max(self.min_order, (nbytes - 1).bit_length())
        at = order
        while at <= self.max_order and not self._lists[at]:
            at += 1
        if at > self.max_order:
            raise HeapFull(f"{owner}: {nbytes} bytes")
        offset = self._lists[at].pop()  # clean: near miss, the halves that are not needed go on the smaller lists
        while at > order:
            at -= 1
            self._lists[at].append(offset + (1 << at))
        return Slab(self, offset, order, owner)

    def alloc_pair(self, nbytes: int, owner: str) -> Optional[List[Slab]]:
        """Two neighbours, for double buffering."""
        order = max(self.min_order, (nbytes - 1).bit_length())
        for at in range(order + 1, self.max_order + 1):
            if self._lists[at]:
                offset = self._lists[at].pop()  # leak: of a chunk more than twice the size only the first two pieces are accounted for
                half = 1 << order
                return [Slab(self, offset, order, owner), Slab(self, offset + half, order, owner)]
        return None

    def free(self, slab: Slab) -> None:
        offset, order = slab.offset, slab.order
        while order < self.max_order:
            buddy = offset ^ (1 << order)
            if buddy not in self._lists[order]:
                break
            self._lists[order].remove(buddy)
            offset = min(offset, buddy)
            order += 1
        self._lists[order].append(offset)
