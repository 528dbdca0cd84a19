import logging
import threading
from typing import Callable, List, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger(__name__)


class ScratchArena:
    """Bump arena with a free list by offset; unequal sizes are rounded up to a granule."""

    def __init__(self, numel: int, granule: int = 256):
        self.flat = torch.empty(numel)
        self.granule = granule
        self._free_granules = list(range(numel // granule))
        self._mu = threading.Lock()

    def grab(self, numel: int) -> Optional["Scratch"]:
        k = -(-numel // self.granule)
        with self._mu:
            if k != 1:
                run = self._find_run(k)
                if run is None:
                    return None
                for g in run:
                    self._free_granules.remove(g)
                return Scratch(self, run, numel)
            if not self._free_granules:
                return None
            return Scratch(self, [self._free_granules.pop()], numel)

    def _find_run(self, k: int) -> Optional[List[int]]:
        ids = sorted(self._free_granules)
        for i in range(len(ids) - k + 1):
            if ids[i + k - 1] - ids[i] == k - 1:
                return ids[i : i + k]
        return None

    def ungrab(self, s: "Scratch") -> None:
        with self._mu:
            self._free_granules.extend(s.run)
            s.run = []


class Scratch:
    __slots__ = ("arena", "run", "numel")

    def __init__(self, arena: ScratchArena, run: List[int], numel: int):
        self.arena, self.run, self.numel = arena, run, numel

    @property
    def tensor(self) -> Tensor:
        start = self.run[0] * self.arena.granule
        return self.arena.flat[start : start + self.numel]

    def free(self) -> None:
        self.arena.ungrab(self)


class Int8Linear(nn.Module):
    def __init__(self, inp: int, out: int, arena: Optional[ScratchArena] = None):
        super().__init__()
        self.register_buffer("q", torch.zeros(out, inp, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(out, 1))
        self.arena = arena
        self.cached: Optional[Scratch] = None
        self.shadow: Optional[Scratch] = None

    def _dequant(self, arena: ScratchArena) -> Optional[Scratch]:
        s = arena.grab(self.q.numel())  # clean: handed to the caller
        if s is None:
            return None
        s.tensor.view_as(self.q).copy_(self.q).mul_(self.scale)
        return s

    def forward(self, x: Tensor) -> Tensor:
        s = self._dequant(self.arena) if self.arena is not None else None  # clean: near miss, freed when there is one
        if s is None:
            return F.linear(x, self.q * self.scale)
        y = F.linear(x, s.tensor.view_as(self.q))
        s.free()
        return y

    def forward_fused(self, x: Tensor, act: Optional[Callable[[Tensor], Tensor]]) -> Tensor:
        s = self._dequant(self.arena)  # leak: without an activation the return comes before the free
        y = F.linear(x, s.tensor.view_as(self.q))
        if act is None:
            return y
        y = act(y)
        s.free()
        return y

    def weight(self) -> Tensor:
        s = self._dequant(self.arena)  # leak: the caller gets a tensor that does not lead back to the scratch
        return s.tensor.view_as(self.q).clone()

    def cache_weight(self) -> bool:
        if self.cached is not None:
            return True
        self.cached = self._dequant(self.arena)  # clean: only when there is none, uncache frees it
        return self.cached is not None

    def refresh(self) -> None:
        self.uncache()
        self.cached = self._dequant(self.arena)  # clean: near miss, the old one was freed in the line above

    def refresh_shadow(self) -> None:
        self.shadow = self._dequant(self.arena)  # leak: the shadow of the refresh before is overwritten without a free

    def drop_shadow(self) -> None:
        if self.shadow is not None:
            self.shadow.free()
            self.shadow = None

    def uncache(self) -> None:
        if self.cached is None:
            return
        self.cached.free()
        self.cached = None

    def error(self, ref: Tensor) -> Tuple[float, float]:
        s = self._dequant(self.arena)  # clean: near miss, the difference has its own tensor and the scratch is freed
        d = s.tensor.view_as(self.q) - ref
        s.free()
        return float(d.abs().max()), float(d.pow(2).mean())


def observe(arena: ScratchArena, xs: List[Tensor], bins: int) -> Union[Tensor, None]:
    hist = arena.grab(bins)  # leak: an input without range returns None and leaves the histogram
    if hist is None:
        return None
    hist.tensor.zero_()
    for x in xs:
        lo, hi = float(x.min()), float(x.max())
        if lo == hi:
            return None
        hist.tensor.add_(torch.histc(x, bins, lo, hi))
    out = hist.tensor.clone()
    hist.free()
    return out


def observe_all(arena: ScratchArena, groups: List[List[Tensor]], bins: int) -> List[Tensor]:
    outs = []
    for xs in groups:
        s = arena.grab(bins)  # clean: near miss, freed before the continue too
        if s is None:
            logger.warning("arena is full")
            break
        if not xs:
            s.free()
            continue
        s.tensor.zero_()
        for x in xs:
            s.tensor.add_(torch.histc(x, bins))
        outs.append(s.tensor.clone())
        s.free()
    return outs


def calibrate(arena: ScratchArena, layers: List[Int8Linear], x: Tensor) -> float:
    scr = [l._dequant(arena) for l in layers]  # clean: near miss, the filter only leaves out those that did not come
    total = 0.0
    for l, s in zip(layers, scr):
        if s is not None:
            total += float(F.linear(x, s.tensor.view_as(l.q)).sum())
    for s in filter(None, scr):
        s.free()
    return total


def calibrate_until(arena: ScratchArena, layers: List[Int8Linear], x: Tensor, cap: float) -> float:
    total = 0.0
    for l in layers:
        s = l._dequant(arena)  # leak: break at the cap leaves the last scratch
        if s is None:
            continue
        total += float(F.linear(x, s.tensor.view_as(l.q)).sum())
        if total > cap:
            break
        s.free()
    return total


class TwoLayer(nn.Module):
    def __init__(self, a: Int8Linear, b: Int8Linear):
        super().__init__()
        self.a, self.b = a, b

    def preload(self) -> bool:
        if not self.a.cache_weight():
            return False
        return self.b.cache_weight()

    def unload(self) -> None:
        self.a.uncache()
        self.b.uncache()
