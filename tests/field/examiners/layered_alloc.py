"""Allocation layers: raw regions, padded regions, and tensors over them."""
from __future__ import annotations

import bisect
from typing import Dict, List, Optional, Tuple


class Region:
    __slots__ = ("start", "length")

    def __init__(self, start: int, length: int):
        self.start = start
        self.length = length


class RawHeap:
    """First fit over a sorted list of free extents."""

    def __init__(self, total: int):
        self._extents: List[Tuple[int, int]] = [(0, total)]

    def grab(self, length: int) -> Optional[Region]:
        for i, (start, size) in enumerate(self._extents):
            if size < length:
                continue
            del self._extents[i]  # clean: near miss, the unused rest is put back and the region is returned
            if size > length:
                bisect.insort(self._extents, (start + length, size - length))
            return Region(start, length)
        return None

    def grab_last(self, length: int) -> Optional[Region]:
        if not self._extents:
            return None
        start, size = self._extents.pop()  # leak: an extent that is too short is not put back before None
        if size < length:
            return None
        if size > length:
            bisect.insort(self._extents, (start, size - length))
        return Region(start + size - length, length)

    def ungrab(self, region: Region) -> None:
        bisect.insort(self._extents, (region.start, region.length))


class PaddedHeap:
    """Rounds requests up and refuses those that are too large."""

    def __init__(self, raw: RawHeap, align: int = 256, cap: int = 1 << 24):
        self.raw = raw
        self.align = align
        self.cap = cap

    def _round(self, n: int) -> int:
        return (n + self.align - 1) // self.align * self.align

    def grab(self, n: int) -> Optional[Region]:
        return self.raw.grab(self._round(n))  # clean: wrapper hands the region on

    def grab_capped(self, n: int) -> Optional[Region]:
        region = self.raw.grab(self._round(n))  # clean: near miss, a region above the cap is given up first
        if region is not None and region.length > self.cap:
            self.raw.ungrab(region)
            region = None
        return region

    def grab_below(self, n: int, limit: int) -> Optional[Region]:
        region = self.raw.grab(self._round(n))  # leak: a region beyond the limit is replaced by None
        if region is not None and region.start >= limit:
            region = None
        return region

    def ungrab(self, region: Region) -> None:
        self.raw.ungrab(region)


class TensorHandle:
    """Owns a region; drop gives it back."""

    def __init__(self, heap: PaddedHeap, region: Region, shape: Tuple[int, ...]):
        self.heap = heap
        self.region: Optional[Region] = region
        self.shape = shape

    def drop(self) -> None:
        if self.region is not None:
            self.heap.ungrab(self.region)
            self.region = None


class TensorFactory:
    def __init__(self, heap: PaddedHeap):
        self.heap = heap

    def make(self, shape: Tuple[int, ...], item: int = 2) -> Optional[TensorHandle]:
        n = item
        for d in shape:
            n *= d
        region = self.heap.grab(n)  # clean: moved into the handle that is returned
        if region is None:
            return None
        return TensorHandle(self.heap, region, shape)

    def make_or_retry(self, shape: Tuple[int, ...]) -> Optional[TensorHandle]:
        handle = self.make(shape)  # clean: near miss, rebound only when it is None
        if handle is None:
            handle = self.make(shape, item=1)  # clean: returned to the caller
        return handle

    def make_best(self, shape: Tuple[int, ...]) -> Optional[TensorHandle]:
        handle = self.make(shape, item=4)  # leak: a handle at a high address is lost by the rebinding
        if handle is None or handle.region.start > 1 << 20:
            handle = self.make(shape)  # clean: returned to the caller
        return handle


class ActivationCache:
    """Handles by layer name for a single forward pass."""

    def __init__(self, factory: TensorFactory):
        self.factory = factory
        self.by_layer: Dict[str, TensorHandle] = {}

    def ensure(self, layer: str, shape: Tuple[int, ...]) -> bool:
        have = self.by_layer.get(layer)
        if have is not None and have.shape == shape:
            return True
        handle = self.factory.make_or_retry(shape)  # clean: near miss, an old handle of another shape is dropped
        if handle is None:
            return False
        if have is not None:
            have.drop()
        self.by_layer[layer] = handle
        return True

    def reshape(self, layer: str, shape: Tuple[int, ...]) -> bool:
        have = self.by_layer.get(layer)
        if have is not None and have.shape == shape:
            return True
        handle = self.factory.make_or_retry(shape)  # leak: overwrites an old handle of another shape without drop
        if handle is None:
            return False
        self.by_layer[layer] = handle
        return True

    def fits(self, shape: Tuple[int, ...]) -> bool:
        return self.factory.make(shape) is not None  # leak: the handle is only compared with None

    def can_hold(self, shape: Tuple[int, ...]) -> bool:
        handle = self.factory.make(shape)  # clean: near miss, dropped when there is one
        if handle is not None:
            handle.drop()
        return handle is not None

    def end_pass(self) -> None:
        for handle in self.by_layer.values():
            handle.drop()
        self.by_layer.clear()
