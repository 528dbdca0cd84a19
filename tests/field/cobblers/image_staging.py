"""Multimodal preprocessing: decode, resize and normalise images through a pool of pinned host buffers."""
from __future__ import annotations

import contextlib
import io
import logging
import threading
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

try:
    import torch
except ImportError:
    torch = None

log = logging.getLogger("mm.staging")

PATCH = 14
MEAN = np.array([0.481, 0.457, 0.408], dtype=np.float32)
STD = np.array([0.268, 0.261, 0.275], dtype=np.float32)


class BadImage(ValueError):
    pass


class PinnedArena:
    """Page-locked scratch. `borrow` waits; `borrow_nowait` gives None instead."""

    def __init__(self, buffers: int, nbytes: int) -> None:
        self._cond = threading.Condition()
        self._idle: List[np.ndarray] = [np.zeros(nbytes, dtype=np.uint8) for _ in range(buffers)]
        self.nbytes = nbytes

    def borrow(self, timeout: Optional[float] = None) -> np.ndarray:
        with self._cond:
            if not self._cond.wait_for(lambda: self._idle, timeout):
                raise TimeoutError("pinned arena is dry")
            return self._idle.pop()

    def borrow_nowait(self) -> Optional[np.ndarray]:
        with self._cond:
            return self._idle.pop() if self._idle else None

    def give_back(self, buf: np.ndarray) -> None:
        with self._cond:
            self._idle.append(buf)
            self._cond.notify()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[np.ndarray]:
        buf = self.borrow()  # clean: given back in the finally
        try:
            yield buf
        finally:
            self.give_back(buf)


class Pixels(NamedTuple):
    buf: np.ndarray
    height: int
    width: int

    def array(self) -> np.ndarray:
        return self.buf[: self.height * self.width * 3].reshape(self.height, self.width, 3)


def _header(blob: bytes) -> Tuple[int, int]:
    if len(blob) < 4 or blob[:2] != b"IM":
        raise BadImage("unknown magic")
    return blob[2] * PATCH, blob[3] * PATCH


class ImageProcessor:
    def __init__(self, arena: PinnedArena, max_patches: int = 256) -> None:
        self.arena = arena
        self.max_patches = max_patches
        self._by_hash: Dict[str, np.ndarray] = {}

    def decode(self, blob: bytes) -> Pixels:
        """Decode into a pinned buffer. The caller gives `.buf` back."""
        h, w = _header(blob)
        buf = self.arena.borrow()  # clean: moved into the returned Pixels
        flat = np.frombuffer(blob[4:], dtype=np.uint8)
        n = min(len(flat), h * w * 3)
        buf[:n] = flat[:n]
        return Pixels(buf, h, w)

    def decode_checked(self, blob: bytes) -> Optional[Pixels]:
        px = self.decode(blob)  # clean: near miss, given back when too large, else handed on
        if px.height * px.width > self.max_patches * PATCH * PATCH:
            self.arena.give_back(px.buf)
            return None
        return px

    def thumbnail(self, blob: bytes, side: int = 4) -> np.ndarray:
        """Small copy for the safety classifier."""
        return self.decode(blob).array()[:side, :side].copy()  # leak: pinned buffer is copied from and dropped

    def mean_colour(self, blob: bytes) -> np.ndarray:
        px = self.decode(blob)  # clean: given back in the finally
        try:
            return px.array().mean(axis=(0, 1))
        finally:
            self.arena.give_back(px.buf)

    def normalise(self, blob: bytes) -> Optional[np.ndarray]:
        px = self.decode_checked(blob)  # leak: an empty image returns before the buffer is given back
        if px is None:
            return None
        img = px.array()
        if img.size == 0:
            log.debug("empty image")
            return None
        out = (img.astype(np.float32) / 255.0 - MEAN) / STD
        self.arena.give_back(px.buf)
        return out

    def process_many(self, blobs: List[bytes]) -> List[np.ndarray]:
        """Images of one prompt, in order. Broken ones become a grey square."""
        out: List[np.ndarray] = []
        for blob in blobs:
            scratch = self.arena.borrow()  # leak: a BadImage takes the continue past the give_back
            try:
                h, w = _header(blob)
            except BadImage:
                out.append(np.full((PATCH, PATCH, 3), 0.5, dtype=np.float32))
                continue
            n = h * w * 3
            scratch[:n] = 0
            scratch[: len(blob) - 4] = np.frombuffer(blob[4:], dtype=np.uint8)[:n]
            out.append(scratch[:n].reshape(h, w, 3).astype(np.float32) / 255.0)
            self.arena.give_back(scratch)
        return out

    def process_video(self, frames: List[bytes], stride: int) -> np.ndarray:
        acc: Optional[np.ndarray] = None
        used = 0
        for i, frame in enumerate(frames):
            if i % stride:
                continue
            with self.arena.borrowed() as buf:  # clean: context manager
                n = len(frame) - 4
                buf[:n] = np.frombuffer(frame[4:], dtype=np.uint8)
                cur = buf[:n].astype(np.float32)
            acc = cur if acc is None else acc + cur
            used += 1
        return acc / max(used, 1)

    def tile(self, blob: bytes, rows: int, cols: int) -> List[np.ndarray]:
        """AnyRes tiling: overview plus a grid. Needs a second buffer for the overview."""
        px = self.decode(blob)  # clean: released after the grid is cut
        overview = self.arena.borrow_nowait()  # leak: the branch for a single tile returns without it
        if overview is None:
            self.arena.give_back(px.buf)
            return []
        img = px.array()
        th, tw = img.shape[0] // rows, img.shape[1] // cols
        tiles = [img[r * th : (r + 1) * th, c * tw : (c + 1) * tw].copy() for r in range(rows) for c in range(cols)]
        self.arena.give_back(px.buf)
        if len(tiles) == 1:
            return tiles
        small = img[::rows, ::cols]
        overview[: small.size] = small.reshape(-1)
        tiles.insert(0, overview[: small.size].reshape(small.shape).copy())
        self.arena.give_back(overview)
        return tiles


class EmbeddingBatcher:
    """Collects decoded images until the vision tower's batch is full."""

    def __init__(self, proc: ImageProcessor, batch: int) -> None:
        self.proc = proc
        self.batch = batch
        self._pending: List[Pixels] = []
        self._last: Optional[Pixels] = None

    def add(self, blob: bytes) -> bool:
        self._pending.append(self.proc.decode(blob))  # clean: flush and close give the pending buffers back
        return len(self._pending) >= self.batch

    def preview(self, blob: bytes) -> Tuple[int, int]:
        """Keeps the latest image around for the playground's side panel."""
        self._last = self.proc.decode(blob)  # leak: the previous preview's buffer is overwritten
        return self._last.height, self._last.width

    def flush(self) -> List[float]:
        pending, self._pending = self._pending, []
        sums = []
        for px in pending:
            sums.append(float(px.array().sum()))
            self.proc.arena.give_back(px.buf)
        return sums

    def close(self) -> None:
        for px in self._pending:
            self.proc.arena.give_back(px.buf)
        self._pending.clear()
        if self._last is not None:
            self.proc.arena.give_back(self._last.buf)
            self._last = None


def load_image(path: str, proc: ImageProcessor) -> Optional[Pixels]:
    f = open(path, "rb")  # leak: a file that is too short returns before close
    head = f.read(4)
    if len(head) < 4:
        return None
    body = f.read()
    f.close()
    return proc.decode(head + body)  # clean: returned to the caller


def describe(blob: bytes, proc: ImageProcessor) -> str:
    buf = io.StringIO()
    px = proc.decode_checked(blob)  # clean: near miss, None has nothing to give back
    if px is not None:
        buf.write(f"{px.height}x{px.width}")
        proc.arena.give_back(px.buf)
    else:
        buf.write("too large")
    return buf.getvalue()
