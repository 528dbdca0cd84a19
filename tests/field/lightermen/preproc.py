"""Image preprocessing on a recycled set of tensors."""
from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import DefaultDict, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

Shape = Tuple[int, ...]
_MEAN = (0.481, 0.457, 0.408)
_STD = (0.268, 0.261, 0.275)


class TensorRecycler:
    """Tensors by shape and type. alloc() gives one (contents undefined), reclaim() takes it back."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._bins: DefaultDict[Tuple[Shape, torch.dtype], List[torch.Tensor]] = defaultdict(list)
        self._lent: Dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def alloc(self, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self._lock:
            bin_ = self._bins[(shape, dtype)]
            t = bin_.pop() if bin_ else torch.empty(shape, dtype=dtype, device=self.device)
            self._lent[id(t)] = t
            return t

    def alloc_zeroed(self, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        t = self.alloc(shape, dtype)  # clean: handed to the caller
        t.zero_()
        return t

    def reclaim(self, t: torch.Tensor) -> None:
        with self._lock:
            self._lent.pop(id(t))
            self._bins[(tuple(t.shape), t.dtype)].append(t)

    def reclaim_all(self, ts: Sequence[torch.Tensor]) -> None:
        for t in ts:
            self.reclaim(t)


_default: Optional[TensorRecycler] = None


def recycler() -> TensorRecycler:
    global _default
    if _default is None:
        _default = TensorRecycler()
    return _default


def _smart_size(h: int, w: int, factor: int, max_pixels: int) -> Tuple[int, int]:
    nh, nw = round(h / factor) * factor, round(w / factor) * factor
    if nh * nw > max_pixels:
        beta = math.sqrt(h * w / max_pixels)
        nh = math.floor(h / beta / factor) * factor
        nw = math.floor(w / beta / factor) * factor
    return max(nh, factor), max(nw, factor)


def to_float(rec: TensorRecycler, image: torch.Tensor) -> torch.Tensor:
    """uint8 HWC to float CHW in a recycled tensor, which is the caller's."""
    h, w, _ = image.shape
    out = rec.alloc((3, h, w))  # clean: handed to the caller
    torch.div(image.permute(2, 0, 1), 255.0, out=out)
    return out


def resize(rec: TensorRecycler, chw: torch.Tensor, size: Tuple[int, int]) -> torch.Tensor:
    out = rec.alloc((3, *size))  # clean: handed to the caller
    out.copy_(F.interpolate(chw[None], size=size, mode="bilinear")[0])
    return out


def normalise_(chw: torch.Tensor) -> torch.Tensor:
    for c in range(3):
        chw[c].sub_(_MEAN[c]).div_(_STD[c])
    return chw


def preprocess(rec: TensorRecycler, image: torch.Tensor, factor: int = 28) -> torch.Tensor:
    """A normalised picture at a size that is a multiple of factor; the caller reclaims it."""
    full = to_float(rec, image)  # clean: handed on when the size fits, else reclaimed
    size = _smart_size(full.shape[1], full.shape[2], factor, 1 << 20)
    if size == tuple(full.shape[1:]):
        return normalise_(full)
    small = resize(rec, full, size)  # clean: handed to the caller
    rec.reclaim(full)
    return normalise_(small)


def preprocess_square(rec: TensorRecycler, image: torch.Tensor, side: int) -> torch.Tensor:
    t = to_float(rec, image)  # leak: rebound by the resized one
    if t.shape[1] != side or t.shape[2] != side:
        t = resize(rec, t, (side, side))  # clean: handed to the caller
    return normalise_(t)


def half_pixel_values(rec: TensorRecycler, images: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    out: List[torch.Tensor] = []
    for image in images:
        t = preprocess(rec, image)  # leak: converted to a new tensor and dropped
        out.append(t.to(torch.float16))
    return out


def stack_batch(rec: TensorRecycler, images: Sequence[torch.Tensor], side: int) -> torch.Tensor:
    """A batch in one recycled tensor, the caller's."""
    batch = rec.alloc_zeroed((len(images), 3, side, side))  # clean: handed to the caller
    for i, image in enumerate(images):
        one = preprocess_square(rec, image, side)  # clean: copied into the batch and reclaimed
        batch[i].copy_(one)
        rec.reclaim(one)
    return batch


def batch_mean(images: Sequence[torch.Tensor], side: int) -> List[float]:
    rec = recycler()
    batch = stack_batch(rec, images, side)  # leak: reduced to numbers, not reclaimed
    return [float(batch[:, c].mean()) for c in range(3)]


def crops(rec: TensorRecycler, chw: torch.Tensor, side: int, most: int) -> List[torch.Tensor]:
    """Tiles of a picture, each in a recycled tensor; the caller reclaims all of them."""
    tiles: List[torch.Tensor] = []
    for y in range(0, chw.shape[1] - side + 1, side):
        for x in range(0, chw.shape[2] - side + 1, side):
            if len(tiles) == most:
                return tiles
            tile = rec.alloc((3, side, side))  # clean: handed to the caller in the list
            tile.copy_(chw[:, y : y + side, x : x + side])
            tiles.append(tile)
    return tiles


def sharpest_crop(rec: TensorRecycler, chw: torch.Tensor, side: int) -> Optional[torch.Tensor]:
    """The tile with the largest variance; the caller reclaims it."""
    tiles = crops(rec, chw, side, 64)  # clean: near miss, all but the winner are reclaimed
    if not tiles:
        return None
    tiles.sort(key=lambda t: float(t.var()))
    winner = tiles.pop()
    rec.reclaim_all(tiles)
    return winner


def flattest_crop(rec: TensorRecycler, chw: torch.Tensor, side: int) -> Optional[torch.Tensor]:
    tiles = crops(rec, chw, side, 64)  # leak: all but the first are dropped
    if not tiles:
        return None
    return min(tiles, key=lambda t: float(t.var()))


class VideoSampler:
    """Averages frames over time with two tensors, swapped in every step."""

    def __init__(self, rec: TensorRecycler, shape: Shape, momentum: float) -> None:
        self.rec = rec
        self.momentum = momentum
        self.avg = rec.alloc_zeroed(shape)  # clean: close() reclaims it
        self.work = rec.alloc_zeroed(shape)  # clean: close() reclaims it
        self.weights = rec.alloc(shape[-1:])  # leak: close() has the two others only
        self.weights.fill_(1.0)

    def feed(self, chw: torch.Tensor) -> None:
        torch.lerp(chw, self.avg, self.momentum, out=self.work)
        self.work.mul_(self.weights)
        self.avg, self.work = self.work, self.avg

    def close(self) -> None:
        self.rec.reclaim(self.avg)
        self.rec.reclaim(self.work)
