"""Memory arena for one training step: regions, nested frames, and layers that build on them."""
from __future__ import annotations

import contextlib
import weakref
from typing import Dict, Generator, List, Optional, Tuple

import torch


class Region:
    __slots__ = ("lo", "hi", "arena", "__weakref__")

    def __init__(self, arena: "Arena", lo: int, hi: int):
        self.arena = arena
        self.lo = lo
        self.hi = hi

    def __len__(self) -> int:
        return self.hi - self.lo

    def tensor(self, shape: Tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return self.arena.base[self.lo : self.hi].view(dtype)[: torch.Size(shape).numel()].view(shape)

    def dispose(self) -> None:
        self.arena.uncarve(self)


class Arena:
    """First fit over a sorted list of holes."""

    def __init__(self, nbytes: int):
        self.base = torch.empty(nbytes, dtype=torch.uint8)
        self._holes: List[Tuple[int, int]] = [(0, nbytes)]
        self._carved = 0

    def carve(self, nbytes: int) -> Region:
        region = self.carve_or_none(nbytes)  # clean: returned, or None with the error
        if region is None:
            raise MemoryError(f"arena has no hole of {nbytes} bytes ({self._carved} carved)")
        return region

    def carve_or_none(self, nbytes: int) -> Optional[Region]:
        nbytes = -(-nbytes // 128) * 128
        for i, (lo, hi) in enumerate(self._holes):
            if hi - lo < nbytes:
                continue
            if hi - lo == nbytes:
                del self._holes[i]
            else:
                self._holes[i] = (lo + nbytes, hi)
            self._carved += nbytes
            return Region(self, lo, lo + nbytes)
        return None

    def uncarve(self, region: Region) -> None:
        self._carved -= len(region)
        holes = sorted(self._holes + [(region.lo, region.hi)])
        merged = [holes[0]]
        for lo, hi in holes[1:]:
            if lo == merged[-1][1]:
                merged[-1] = (merged[-1][0], hi)
            else:
                merged.append((lo, hi))
        self._holes = merged

    def grow_region(self, region: Region, nbytes: int) -> Region:
        """A larger region with the same contents; the old one is taken back."""
        if len(region) >= nbytes:
            return region
        bigger = self.carve(nbytes)  # clean: returned to the caller
        self.base[bigger.lo : bigger.lo + len(region)].copy_(self.base[region.lo : region.hi])
        self.uncarve(region)
        return bigger

    @contextlib.contextmanager
    def frame(self) -> Generator["Frame", None, None]:
        fr = Frame(self)
        try:
            yield fr
        finally:
            fr.unwind()


class Frame:
    """Regions that are given back together."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self._regions: List[Region] = []

    def take(self, nbytes: int) -> Region:
        region = self.arena.carve(nbytes)  # clean: near miss, in _regions, unwind gives it back
        self._regions.append(region)
        return region

    def detach(self, region: Region) -> Region:
        """Takes a region out of the frame; it outlives it and belongs to the caller."""
        self._regions.remove(region)
        return region

    def unwind(self) -> None:
        while self._regions:
            self.arena.uncarve(self._regions.pop())


class ActivationLog:
    """Saved activations by layer, each in a region."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self._by_layer: Dict[int, Region] = {}
        self._shapes: Dict[int, Tuple[int, ...]] = {}

    def save(self, layer: int, value: torch.Tensor) -> None:
        old = self._by_layer.pop(layer, None)
        if old is not None:
            old.dispose()
        region = self.arena.carve(value.numel() * 2)  # clean: near miss, save, load and clear dispose of it
        region.tensor(tuple(value.shape)).copy_(value)
        self._by_layer[layer] = region
        self._shapes[layer] = tuple(value.shape)

    def load(self, layer: int) -> torch.Tensor:
        region = self._by_layer.pop(layer)
        value = region.tensor(self._shapes.pop(layer)).clone()
        region.dispose()
        return value

    def clear(self) -> None:
        for region in self._by_layer.values():
            region.dispose()
        self._by_layer.clear()
        self._shapes.clear()


class MaskLog:
    """Dropout masks by layer, packed to bytes."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self._masks: Dict[int, Region] = {}

    def save(self, layer: int, mask: torch.Tensor) -> None:
        region = self.arena.carve(mask.numel())  # leak: apply pops the region and only reads it
        region.tensor(tuple(mask.shape), torch.uint8).copy_(mask)
        self._masks[layer] = region

    def apply(self, layer: int, grad: torch.Tensor) -> torch.Tensor:
        region = self._masks.pop(layer)
        return grad * region.tensor(tuple(grad.shape), torch.uint8)


class MlpBlock:
    def __init__(self, hidden: int, ffn: int, arena: Arena, layer: int):
        self.w1 = torch.randn(hidden, ffn) * 0.02
        self.w2 = torch.randn(ffn, hidden) * 0.02
        self.arena = arena
        self.layer = layer
        self._gate: Optional[Region] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.arena.frame() as fr:  # clean: unwound at the end of the block
            mid = fr.take(x.shape[0] * self.w1.shape[1] * 2)  # clean: near miss, the frame gives it back
            h = mid.tensor((x.shape[0], self.w1.shape[1]))
            torch.mm(x, self.w1, out=h)
            if self.layer == 0:
                return torch.relu(h) @ self.w2
            return torch.nn.functional.gelu(h) @ self.w2

    def forward_gated(self, x: torch.Tensor, keep_gate: bool) -> torch.Tensor:
        gate = self.arena.carve(x.numel() * 2)  # clean: near miss, kept in _gate or disposed of at once
        g = gate.tensor(tuple(x.shape))
        torch.sigmoid(x, out=g)
        out = self.forward(x * g)
        if keep_gate:
            self.drop_gate()
            self._gate = gate
        else:
            gate.dispose()
        return out

    def drop_gate(self) -> None:
        if self._gate is not None:
            self._gate.dispose()
            self._gate = None

    def backward_input(self, grad: torch.Tensor) -> torch.Tensor:
        tmp = self.arena.carve(grad.shape[0] * self.w2.shape[0] * 2)  # leak: a zero gradient returns early
        dh = tmp.tensor((grad.shape[0], self.w2.shape[0]))
        torch.mm(grad, self.w2.t(), out=dh)
        if not bool(dh.any()):
            return torch.zeros(grad.shape[0], self.w1.shape[0])
        dx = dh @ self.w1.t()
        tmp.dispose()
        return dx


def detached_output(arena: Arena, x: torch.Tensor, scale: float) -> Region:
    """Scaled input in a region of its own; the caller disposes of it."""
    with arena.frame() as fr:  # clean: everything but the result is unwound
        tmp = fr.take(x.numel() * 2)  # clean: near miss, the frame gives it back
        tmp.tensor(tuple(x.shape)).copy_(x)
        res = fr.take(x.numel() * 2)  # clean: near miss, detached and returned
        torch.mul(tmp.tensor(tuple(x.shape)), scale, out=res.tensor(tuple(x.shape)))
        return fr.detach(res)


def scaled_last(arena: Arena, xs: List[torch.Tensor], scale: float) -> torch.Tensor:
    region = detached_output(arena, xs[0], scale)  # leak: the first region is lost by the loop's assignment
    for x in xs[1:]:
        region = detached_output(arena, x, scale)  # leak: each turn replaces the region of the turn before
    value = region.tensor(tuple(xs[-1].shape)).clone()
    region.dispose()
    return value


def pack_ragged(arena: Arena, rows: List[torch.Tensor]) -> torch.Tensor:
    region = arena.carve(256)  # clean: near miss, grow_region takes the old one back, disposed of at the end
    used = 0
    for row in rows:
        region = arena.grow_region(region, used + row.numel() * 2)  # clean: near miss, it ends the old one
        region.tensor((used // 2 + row.numel(),))[used // 2 :].copy_(row)
        used += row.numel() * 2
    packed = region.tensor((used // 2,)).clone()
    region.dispose()
    return packed


def pack_padded(arena: Arena, rows: List[torch.Tensor], width: int) -> Optional[torch.Tensor]:
    region = arena.carve_or_none(len(rows) * width * 2)  # leak: a row that is too long returns None with it
    if region is None:
        return None
    grid = region.tensor((len(rows), width))
    grid.zero_()
    for i, row in enumerate(rows):
        if row.numel() > width:
            return None
        grid[i, : row.numel()].copy_(row)
    out = grid.clone()
    region.dispose()
    return out


def as_owned_tensor(arena: Arena, value: torch.Tensor) -> torch.Tensor:
    """A tensor in the arena that gives its region back when it is collected."""
    region = arena.carve(value.numel() * 2)  # clean: near miss, the finalizer disposes of it
    out = region.tensor(tuple(value.shape))
    out.copy_(value)
    weakref.finalize(out, region.dispose)
    return out


def two_level(arena: Arena, x: torch.Tensor) -> torch.Tensor:
    with contextlib.ExitStack() as stack:
        outer = stack.enter_context(arena.frame())  # clean: the exit stack closes the frame
        kept = outer.take(x.numel() * 2)  # clean: near miss, the frame gives it back
        side = arena.carve(x.numel() * 2)  # clean: near miss, the exit stack calls dispose
        stack.callback(side.dispose)
        extra = outer.take(x.numel() * 2)  # leak: detached from the frame and not disposed of
        outer.detach(extra)
        for region, factor in ((kept, 1.0), (side, 0.5), (extra, 0.25)):
            torch.mul(x, factor, out=region.tensor(tuple(x.shape)))
        return kept.tensor(tuple(x.shape)) + side.tensor(tuple(x.shape)) + extra.tensor(tuple(x.shape))
