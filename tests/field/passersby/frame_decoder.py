"""Video frame decoding for multimodal preprocessing."""
import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Deque, Dict, Generator, Iterator, List, Optional, Tuple, Union

import numpy as np
import torch

log = logging.getLogger(__name__)


@dataclass
class Packet:
    kind: str
    pts: int
    payload: bytes


class Surface:
    def __init__(self, index: int, h: int, w: int) -> None:
        self.index = index
        self.pixels = np.zeros((h, w, 3), np.uint8)
        self.pts = -1


class SurfacePool:
    def __init__(self, n: int, h: int, w: int) -> None:
        self._surfaces = [Surface(i, h, w) for i in range(n)]
        self._mask = np.ones(n, dtype=bool)

    def lock_surface(self) -> Optional[Surface]:
        free = np.flatnonzero(self._mask)
        if free.size == 0:
            return None
        self._mask[free[0]] = False  # clean: this surface is returned
        return self._surfaces[free[0]]

    def unlock_surface(self, s: Surface) -> None:
        s.pts = -1
        self._mask[s.index] = True

    def idle(self) -> int:
        return int(self._mask.sum())


class Decoder:
    def __init__(self, pool: SurfacePool, reorder: int = 2) -> None:
        self.pool = pool
        self.reorder = reorder
        self.dpb: Deque[Surface] = deque()
        self.reference: Optional[Surface] = None
        self.golden: Optional[Surface] = None
        self.dropped = 0

    def _paint(self, s: Surface, p: Packet) -> None:
        raw = np.frombuffer(p.payload, np.uint8)
        flat = s.pixels.reshape(-1)
        flat[: raw.size] = raw[: flat.size]
        s.pts = p.pts

    def feed(self, p: Packet) -> Optional[Surface]:
        """Returns a surface when one is due; the caller unlocks it."""
        s = self.pool.lock_surface()  # leak: packets of an unknown kind and empty ones return with the surface locked
        if s is None:
            self.dropped += 1
            return None
        match p.kind:
            case "key" | "delta" if p.payload:
                self._paint(s, p)
                self.dpb.append(s)
            case _:
                log.debug("skip packet %s at %d", p.kind, p.pts)
                return None
        if len(self.dpb) > self.reorder:
            return self.dpb.popleft()
        return None

    def feed_strict(self, p: Packet) -> Optional[Surface]:
        if p.kind not in ("key", "delta"):
            raise ValueError(p.kind)
        s = self.pool.lock_surface()  # clean: near miss, goes to dpb, comes out as a result or in flush
        if s is None:
            return None
        self._paint(s, p)
        self.dpb.append(s)
        return self.dpb.popleft() if len(self.dpb) > self.reorder else None

    def set_reference(self, p: Packet) -> bool:
        s = self.pool.lock_surface()  # clean: near miss, the old reference is unlocked before it is replaced
        if s is None:
            return False
        self._paint(s, p)
        if self.reference is not None:
            self.pool.unlock_surface(self.reference)
        self.reference = s
        return True

    def set_golden(self, p: Packet) -> bool:
        s = self.pool.lock_surface()  # leak: flush resets golden to None without unlocking
        if s is None:
            return False
        self._paint(s, p)
        if self.golden is not None:
            self.pool.unlock_surface(self.golden)
        self.golden = s
        return True

    def flush(self) -> None:
        while self.dpb:
            self.pool.unlock_surface(self.dpb.popleft())
        if self.reference is not None:
            self.pool.unlock_surface(self.reference)
            self.reference = None
        self.golden = None


def read_packets(path: Union[str, Path], size: int) -> Generator[Packet, None, None]:
    with open(path, "rb") as f:  # clean: with statement
        pts = 0
        while data := f.read(size):
            yield Packet("key" if pts % 12 == 0 else "delta", pts, data)
            pts += 1


def count_packets(path: Union[str, Path], size: int) -> int:
    f = open(path, "rb")  # leak: a bad magic number returns 0 with the file open
    if f.read(4) != b"VPK0":
        return 0
    n = 0
    while f.read(size):
        n += 1
    f.close()
    return n


def decode_all(dec: Decoder, packets: Iterator[Packet]) -> List[torch.Tensor]:
    out = []
    for p in packets:
        s = dec.feed_strict(p)  # clean: unlocked after the copy
        if s is None:
            continue
        out.append(torch.from_numpy(s.pixels.copy()))
        dec.pool.unlock_surface(s)
    dec.flush()
    return out


def decode_every(dec: Decoder, packets: Iterator[Packet], stride: int) -> List[torch.Tensor]:
    out = []
    for p in packets:
        s = dec.feed_strict(p)  # leak: frames between the strides are skipped locked
        if s is None or s.pts % stride:
            continue
        out.append(torch.from_numpy(s.pixels.copy()))
        dec.pool.unlock_surface(s)
    dec.flush()
    return out


def thumbnail(dec: Decoder, packets: Iterator[Packet], at: int) -> Optional[torch.Tensor]:
    for p in packets:
        s = dec.feed(p)  # clean: near miss, unlocked before both the return and the next round
        if s is None:
            continue
        hit = s.pts >= at
        thumb = torch.from_numpy(s.pixels[::8, ::8].copy()) if hit else None
        dec.pool.unlock_surface(s)
        if hit:
            dec.flush()
            return thumb
    dec.flush()
    return None


def scene_cuts(dec: Decoder, packets: Iterator[Packet], limit: float) -> List[int]:
    cuts: List[int] = []
    prev: Optional[Surface] = None
    for p in packets:
        s = dec.feed_strict(p)  # clean: near miss, lives one round longer as prev, then unlocked; the last one after the loop
        if s is None:
            continue
        if prev is not None:
            if float(np.abs(s.pixels.astype(int) - prev.pixels).mean()) > limit:
                cuts.append(s.pts)
            dec.pool.unlock_surface(prev)
        prev = s
    if prev is not None:
        dec.pool.unlock_surface(prev)
    dec.flush()
    return cuts


def first_bright(dec: Decoder, packets: Iterator[Packet], level: float) -> int:
    for p in packets:
        s = dec.feed(p)  # leak: the bright frame's number is returned, its surface stays locked
        if s is None:
            continue
        if float(s.pixels.mean()) > level:
            dec.flush()
            return s.pts
        dec.pool.unlock_surface(s)
    dec.flush()
    return -1
