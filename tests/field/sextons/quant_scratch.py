from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


class DequantBuffer:
    __slots__ = ("slot", "data")

    def __init__(self, slot: int, data: torch.Tensor) -> None:
        self.slot = slot
        self.data = data


class DequantRing:
    def __init__(self, n: int, elems: int, device: str = "cuda") -> None:
        self.elems = elems
        self._buffers = [DequantBuffer(i, torch.empty(elems, dtype=torch.float16, device=device)) for i in range(n)]
        self._idle = list(range(n))

    def borrow(self) -> DequantBuffer | None:
        if not self._idle:
            return None
        return self._buffers[self._idle.pop()]

    def restore(self, buf: DequantBuffer) -> None:
        self._idle.append(buf.slot)

    def borrow_for(self, shape: tuple[int, int]) -> DequantBuffer | None:
        buf = self.borrow()  # leak: lost when the shape turns out too large
        if buf is None:
            return None
        if shape[0] * shape[1] > self.elems:
            log.warning("layer %s does not fit the dequant ring", shape)
            return None
        return buf


@dataclass
class PackedWeight:
    name: str
    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    shape: tuple[int, int]
    refs: int = 0


class WeightStore:
    """Packed weights kept on the device; entries with references are not evicted."""

    def __init__(self, root: Path, capacity: int) -> None:
        self.root = root
        self.capacity = capacity
        self._items: OrderedDict[str, PackedWeight] = OrderedDict()

    def _load(self, name: str) -> PackedWeight:
        blob: dict[str, Any] = torch.load(self.root / f"{name}.pt", map_location="cuda")
        return PackedWeight(name, blob["qweight"], blob["scales"], blob.get("zeros"), tuple(blob["shape"]))

    def _evict(self) -> None:
        for key, item in list(self._items.items()):
            if len(self._items) <= self.capacity:
                return
            if item.refs == 0:
                del self._items[key]

    def retain(self, name: str) -> PackedWeight:
        item = self._items.get(name)
        if item is None:
            item = self._load(name)
            self._items[name] = item
        self._items.move_to_end(name)
        item.refs += 1
        self._evict()
        return item

    def drop(self, item: PackedWeight) -> None:
        if item.refs <= 0:
            raise ValueError(f"{item.name} dropped too often")
        item.refs -= 1


class QuantLinear:
    def __init__(self, name: str, store: WeightStore, ring: DequantRing) -> None:
        self.name = name
        self.store = store
        self.ring = ring
        self._pinned: PackedWeight | None = None

    def pin(self) -> None:
        if self._pinned is None:
            self._pinned = self.store.retain(self.name)  # clean: kept in _pinned, dropped by unpin

    def unpin(self) -> None:
        if self._pinned is not None:
            self.store.drop(self._pinned)
            self._pinned = None

    def _weight(self) -> tuple[PackedWeight, bool]:
        if self._pinned is not None:
            return self._pinned, False
        return self.store.retain(self.name), True  # clean: handed to the caller together with the ownership flag

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, owned = self._weight()  # clean: near miss, dropped only when owned, and that is right
        if x.shape[0] <= 8:
            y = torch.ops.quant.gemv(x, weight.qweight, weight.scales, weight.zeros)
            if owned:
                self.store.drop(weight)
            return y
        buf = self.ring.borrow_for(weight.shape)  # clean: restored below
        if buf is None:
            y = torch.ops.quant.gemm(x, weight.qweight, weight.scales, weight.zeros)
        else:
            dense = buf.data[: weight.shape[0] * weight.shape[1]].view(weight.shape)
            torch.ops.quant.dequant(weight.qweight, weight.scales, weight.zeros, dense)
            y = x @ dense.t()
            self.ring.restore(buf)
        if owned:
            self.store.drop(weight)
        return y

    def dense_norm(self) -> float:
        weight, owned = self._weight()  # leak: an owned weight is not dropped when no buffer is idle
        buf = self.ring.borrow()  # clean: restored before the return
        if buf is None:
            return float("nan")
        dense = buf.data[: weight.shape[0] * weight.shape[1]].view(weight.shape)
        torch.ops.quant.dequant(weight.qweight, weight.scales, weight.zeros, dense)
        value = float(dense.float().norm())
        self.ring.restore(buf)
        if owned:
            self.store.drop(weight)
        return value


class FusedQKV:
    def __init__(self, prefix: str, store: WeightStore, ring: DequantRing) -> None:
        self.prefix = prefix
        self.store = store
        self.ring = ring

    def forward(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        parts: list[PackedWeight] = []
        for leg in ("q", "k", "v"):
            parts.append(self.store.retain(f"{self.prefix}.{leg}"))  # clean: all parts are dropped in the finally
        try:
            buf = self.ring.borrow()  # clean: near miss, the return inside comes after restore
            if buf is None:
                return None
            outs = []
            for part in parts:
                dense = buf.data[: part.shape[0] * part.shape[1]].view(part.shape)
                torch.ops.quant.dequant(part.qweight, part.scales, part.zeros, dense)
                outs.append(x @ dense.t())
            self.ring.restore(buf)
            return outs
        finally:
            for part in parts:
                self.store.drop(part)

    def calibrate(self, x: torch.Tensor) -> dict[str, float]:
        spread: dict[str, float] = {}
        for leg in ("q", "k", "v"):
            part = self.store.retain(f"{self.prefix}.{leg}")  # leak: symmetric weights take the continue without drop
            if part.zeros is None:
                spread[leg] = 0.0
                continue
            spread[leg] = float(part.zeros.float().std())
            self.store.drop(part)
        return spread


def compare(store: WeightStore, ring: DequantRing, left: str, right: str) -> float | None:
    a = ring.borrow()  # clean: restored when b is missing and at the end
    if a is None:
        return None
    b = ring.borrow()  # clean: restored at the end
    if b is None:
        ring.restore(a)
        return None
    wa, wb = store.retain(left), store.retain(right)  # leak: the weights of unequal shape are never dropped
    if wa.shape != wb.shape:
        ring.restore(a)
        ring.restore(b)
        return None
    for w, buf in ((wa, a), (wb, b)):
        n = w.shape[0] * w.shape[1]
        torch.ops.quant.dequant(w.qweight, w.scales, w.zeros, buf.data[:n].view(w.shape))
    n = wa.shape[0] * wa.shape[1]
    diff = float((a.data[:n] - b.data[:n]).abs().max())
    for buf in (a, b):
        ring.restore(buf)
    store.drop(wa)
    store.drop(wb)
    return diff
