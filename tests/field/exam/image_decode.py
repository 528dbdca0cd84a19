"""Decode stage of a vision data pipeline: canvases are recycled, temporary planes too."""
from __future__ import annotations

import logging
import math
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Iterable, Iterator, List, Optional

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

Canvas = namedtuple("Canvas", "pixels slot")
Decoded = namedtuple("Decoded", "name canvas label")


class CanvasFarm:
    def __init__(self, n: int, h: int, w: int) -> None:
        self.h, self.w = h, w
        self._store = torch.zeros(n, 3, h, w)
        self._bits = (1 << n) - 1

    def rent_canvas(self) -> Optional[Canvas]:
        if self._bits == 0:
            return None
        slot = (self._bits & -self._bits).bit_length() - 1
        self._bits &= ~(1 << slot)
        return Canvas(self._store[slot], slot)

    def vacate(self, c: Canvas) -> None:
        self._bits |= 1 << c.slot

    @property
    def vacant(self) -> int:
        return bin(self._bits).count("1")


def _fake_decode(name: str, h: int, w: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(len(name))
    return torch.rand(3, h, w, generator=g)


class DecodeStage:
    def __init__(self, farm: CanvasFarm, *, skip_bad: bool = True, hold: int = 4) -> None:
        self.farm = farm
        self.skip_bad = skip_bad
        self.hold = hold
        self.window: List[Decoded] = []
        self.mean_canvas: Optional[Canvas] = None

    def decode(self, name: str, label: int) -> Optional[Decoded]:
        c = self.farm.rent_canvas()  # clean: near miss, a bad name vacates, else it travels in the result
        if c is None:
            return None
        if name.endswith(".bad"):
            self.farm.vacate(c)
            return None
        c.pixels.copy_(_fake_decode(name, self.farm.h, self.farm.w))
        return Decoded(name, c, label)

    def decode_lenient(self, name: str, label: int) -> Optional[Decoded]:
        c = self.farm.rent_canvas()  # leak: with skip_bad a bad name returns None and keeps the canvas
        if c is None:
            return None
        if name.endswith(".bad"):
            if self.skip_bad:
                return None
            c.pixels.zero_()
        else:
            c.pixels.copy_(_fake_decode(name, self.farm.h, self.farm.w))
        return Decoded(name, c, label)

    def stream(self, items: Iterable[tuple[str, int]]) -> Iterator[torch.Tensor]:
        for name, label in items:
            d = self.decode(name, label)  # clean: near miss, vacated before the yield
            if d is None:
                continue
            out = d.canvas.pixels.clone()
            self.farm.vacate(d.canvas)
            yield out

    def stream_labels(self, items: Iterable[tuple[str, int]], wanted: int) -> Iterator[torch.Tensor]:
        for name, label in items:
            d = self.decode(name, label)  # leak: another label continues with the canvas
            if d is None or d.label != wanted:
                continue
            yield d.canvas.pixels.clone()
            self.farm.vacate(d.canvas)

    def push(self, name: str, label: int) -> None:
        d = self.decode(name, label)  # clean: kept in the window, overflow and close vacate
        if d is None:
            return
        self.window.append(d)
        while len(self.window) > self.hold:
            self.farm.vacate(self.window.pop(0).canvas)

    def close(self) -> None:
        for d in self.window:
            self.farm.vacate(d.canvas)
        self.window = []

    def thumbnails(self, names: List[str], size: int) -> List[torch.Tensor]:
        thumbs = []
        for n in names:
            d = self.decode_lenient(n, 0)  # clean: vacated in the same turn
            if d is not None:
                thumbs.append(F.interpolate(d.canvas.pixels[None], size=size)[0])
                self.farm.vacate(d.canvas)
        return thumbs

    def histogram(self, name: str, bins: int) -> torch.Tensor:
        d = self.decode(name, -1)  # leak: the result is a histogram, the canvas is forgotten
        if d is None:
            return torch.zeros(bins)
        return torch.histc(d.canvas.pixels, bins=bins, min=0.0, max=1.0)

    def blend(self, a: str, b: str, alpha: float) -> Optional[torch.Tensor]:
        da = self.decode(a, 0)  # leak: a missing second image returns None with the first canvas
        db = self.decode(b, 0)  # clean: near miss, vacated when da is missing and after the blend
        if da is None:
            if db is not None:
                self.farm.vacate(db.canvas)
            return None
        if db is None:
            return None
        out = da.canvas.pixels * alpha + db.canvas.pixels * (1 - alpha)
        self.farm.vacate(da.canvas)
        self.farm.vacate(db.canvas)
        return out

    def update_mean(self, name: str) -> None:
        if self.mean_canvas is None:
            self.mean_canvas = self.farm.rent_canvas()  # clean: near miss, one canvas for the object's life, finish vacates it
        if self.mean_canvas is None:
            return
        self.mean_canvas.pixels.mul_(0.9).add_(_fake_decode(name, self.farm.h, self.farm.w), alpha=0.1)

    def finish(self) -> Optional[torch.Tensor]:
        c, self.mean_canvas = self.mean_canvas, None
        if c is None:
            return None
        out = c.pixels.clone()
        self.farm.vacate(c)
        return out

    def tile(self, names: List[str]) -> Optional[torch.Tensor]:
        canvases = []
        for _ in names:
            c = self.farm.rent_canvas()  # leak: None raises while earlier canvases are in the list
            if c is None:
                raise BufferError("not enough canvases")
            canvases.append(c)
        for n, c in zip(names, canvases):
            c.pixels.copy_(_fake_decode(n, self.farm.h, self.farm.w))
        out = torch.cat([c.pixels for c in canvases], dim=-1)
        for c in canvases:
            self.farm.vacate(c)
        return out

    def threaded(self, names: List[str], ex: ThreadPoolExecutor) -> int:
        futs = [ex.submit(self.decode, n, 0) for n in names]  # clean: near miss, run by the executor, every result is vacated
        rows = math.ceil(len(futs) / 2)
        for f in futs:
            d = f.result()
            if d is not None:
                self.farm.vacate(d.canvas)
        return rows

    def invert(self, name: str) -> Optional[torch.Tensor]:
        d = self.decode(name, 0)  # leak: d is rebound to the inverted pixels
        if d is None:
            return None
        d = 1.0 - d.canvas.pixels
        return d
