"""Video input for vision models: hardware decoder surfaces, frame sampling, tiling.

    with Decoder(path, device=0) as dec:
        for clip in clips(dec, every=15, length=8):
            model(clip.tensor)
            clip.close()
"""

import logging
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Iterator, List, Optional

import numpy as np
import torch

from hwvideo import Demuxer, EndOfStream, HwError, create_surface, destroy_surface

logger = logging.getLogger(__name__)


class NoSurface(RuntimeError):
    pass


class CorruptFrame(ValueError):
    pass


@dataclass(eq=False)
class Surface:
    index: int
    ptr: int
    width: int
    height: int
    pts: Optional[Fraction] = None
    holders: int = 0


class SurfacePool:
    """Decoder output surfaces. A surface is lent out until its last holder lets go."""

    def __init__(self, count: int, width: int, height: int):
        self.surfaces: List[Surface] = []
        self.idle: List[Surface] = []
        for i in range(count):
            try:
                ptr = create_surface(width, height)  # leak: when a later creation fails the handler raises without destroying the earlier surfaces
            except HwError as exc:
                raise NoSurface(f"only {i} surfaces could be made") from exc
            self.surfaces.append(Surface(i, ptr, width, height))
        self.idle.extend(self.surfaces)

    def acquire(self) -> Surface:
        if not self.idle:
            raise NoSurface("all surfaces are in use")
        s = self.idle.pop(0)  # clean: returned with one holder
        s.holders = 1
        s.pts = None
        return s

    def retain(self, s: Surface) -> Surface:
        s.holders += 1
        return s

    def release(self, s: Surface) -> None:
        s.holders -= 1
        if s.holders == 0:
            self.idle.append(s)

    def destroy(self) -> None:
        for s in self.surfaces:
            destroy_surface(s.ptr)
        self.surfaces.clear()
        self.idle.clear()


class Decoder:
    def __init__(self, path: str, device: int = 0, surfaces: int = 12):
        self.path = path
        self.device = device
        self.n_surfaces = surfaces
        self.demux: Optional[Demuxer] = None
        self.pool: Optional[SurfacePool] = None
        self.last: Optional[Surface] = None
        self.corrupt = 0

    def __enter__(self) -> "Decoder":
        self.demux = Demuxer(self.path)  # leak: NoSurface from the pool leaves __enter__, so that __exit__ does not close the file
        self.pool = SurfacePool(self.n_surfaces, self.demux.width, self.demux.height)  # clean: destroyed in __exit__
        return self

    def __exit__(self, *exc) -> None:
        if self.last is not None:
            self.pool.release(self.last)
            self.last = None
        self.pool.destroy()
        self.demux.close()

    def next_surface(self) -> Optional[Surface]:
        """The next frame, or None at the end. The caller releases the surface."""
        s = self.pool.acquire()  # leak: on a corrupt packet CorruptFrame is raised with the surface still lent
        try:
            info = self.demux.decode_into(s.ptr)
        except EndOfStream:
            self.pool.release(s)
            return None
        if info.flags & 1:
            self.corrupt += 1
            raise CorruptFrame(info.pts)
        s.pts = Fraction(info.pts, self.demux.timescale)
        return s

    def remember(self, s: Surface) -> None:
        """Keeps the last good frame for concealment."""
        kept = self.pool.retain(s)  # clean: near miss, the one kept before is released, the last one by __exit__
        if self.last is not None:
            self.pool.release(self.last)
        self.last = kept

    def next_concealed(self) -> Optional[Surface]:
        try:
            s = self.next_surface()  # clean: remembered and returned, the caller releases it
        except CorruptFrame:
            if self.last is None:
                raise
            return self.pool.retain(self.last)  # clean: the caller gets a holder of its own
        if s is not None:
            self.remember(s)
        return s

    def skip(self, n: int) -> int:
        done = 0
        for _ in range(n):
            s = self.next_concealed()  # clean: released in the next lines unless it is None
            if s is None:
                break
            self.pool.release(s)
            done += 1
        return done


class Clip:
    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.surfaces: List[Surface] = []
        self.tensor: Optional[torch.Tensor] = None

    def add(self, s: Surface) -> None:
        self.surfaces.append(s)

    def build(self) -> "Clip":
        planes = [to_rgb(s, self.decoder.device) for s in self.surfaces]
        self.tensor = torch.stack(planes)
        return self

    def close(self) -> None:
        for s in self.surfaces:
            self.decoder.pool.release(s)
        self.surfaces.clear()
        self.tensor = None


def to_rgb(s: Surface, device: int) -> torch.Tensor:
    y = torch.empty((s.height * 3 // 2, s.width), dtype=torch.uint8, device=f"cuda:{device}")
    y.copy_(torch.from_dlpack(s.ptr))
    luma = y[: s.height].float()
    chroma = y[s.height :].float().view(s.height // 2, s.width // 2, 2)
    chroma = chroma.repeat_interleave(2, 0).repeat_interleave(2, 1) - 128
    r = luma + 1.402 * chroma[..., 1]
    g = luma - 0.344 * chroma[..., 0] - 0.714 * chroma[..., 1]
    b = luma + 1.772 * chroma[..., 0]
    return torch.stack([r, g, b]).clamp_(0, 255)


def clips(dec: Decoder, every: int, length: int) -> Iterator[Clip]:
    """Whole clips only; the consumer closes each of them."""
    while True:
        clip = Clip(dec)
        for _ in range(length):
            s = dec.next_concealed()  # leak: at the end of the stream the half-filled clip is thrown away with its surfaces
            if s is None:
                return
            clip.add(s)
            dec.skip(every - 1)
        yield clip.build()


def thumbnails(dec: Decoder, count: int, total: int) -> List[np.ndarray]:
    out = []
    step = max(1, math.floor(total / max(count, 1)))
    while len(out) < count:
        s = dec.next_concealed()  # clean: near miss, the finally releases it on the way through continue also
        if s is None:
            break
        try:
            if s.pts is not None and s.pts < 0:
                continue
            out.append(to_rgb(s, dec.device)[:, ::8, ::8].byte().cpu().numpy())
        finally:
            dec.pool.release(s)
        dec.skip(step - 1)
    return out


def scene_cuts(dec: Decoder, threshold: float = 0.3) -> List[Fraction]:
    """Compares neighbours by their histograms."""
    cuts: List[Fraction] = []
    prev = dec.next_concealed()  # clean: near miss, in each round the older one is released, the last one at the end
    if prev is None:
        return cuts
    try:
        while True:
            cur = dec.next_concealed()  # clean: becomes prev
            if cur is None:
                break
            a, b = (torch.histc(to_rgb(s, dec.device), 64, 0, 255) for s in (prev, cur))
            if float((a - b).abs().sum() / a.sum()) > threshold:
                cuts.append(cur.pts)
            dec.pool.release(prev)
            prev = cur
    finally:
        dec.pool.release(prev)
    return cuts


def describe(path: str, model, device: int = 0) -> Optional[str]:
    with Decoder(path, device) as dec:  # clean: closed by the with
        best, best_score = None, -1.0
        for _ in range(64):
            s = dec.next_concealed()  # leak: a frame that beats the best one takes its name without the older one being released
            if s is None:
                break
            score = float(to_rgb(s, device).std())
            if score > best_score:
                best, best_score = s, score
            else:
                dec.pool.release(s)
        if best is None:
            return None
        text = model.caption(to_rgb(best, device))
        dec.pool.release(best)
        return text
