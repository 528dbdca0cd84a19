"""Decoder surfaces of a hardware video engine: mapping, reference counts and the display queue."""
from __future__ import annotations

import heapq
import logging
import threading
from typing import Dict, List, NamedTuple, Optional

log = logging.getLogger(__name__)


class PicParams(NamedTuple):
    pic_idx: int
    poc: int
    is_reference: bool
    progressive: bool = True
    refs: tuple = ()


class Surface:
    __slots__ = ("pic_idx", "devptr", "pitch", "refs", "poc")

    def __init__(self, pic_idx: int, devptr: int, pitch: int) -> None:
        self.pic_idx = pic_idx
        self.devptr = devptr
        self.pitch = pitch
        self.refs = 0
        self.poc = 0

    def __lt__(self, other: "Surface") -> bool:
        return self.poc < other.poc


class SurfaceTable:
    """The engine has a small number of output surfaces; each one mapped must be unmapped."""

    BASE = 0x7F000000

    def __init__(self, count: int, pitch: int) -> None:
        self._lock = threading.Lock()
        self._idle: List[Surface] = [Surface(i, self.BASE + i * pitch * 1088, pitch) for i in range(count)]
        self._mapped: Dict[int, Surface] = {}

    def map_surface(self, pic_idx: int) -> Optional[Surface]:
        with self._lock:
            if not self._idle:
                return None
            surface = self._idle.pop()
            surface.pic_idx = pic_idx
            self._mapped[surface.devptr] = surface
            return surface

    def unmap_surface(self, surface: Surface) -> None:
        with self._lock:
            del self._mapped[surface.devptr]
            self._idle.append(surface)

    def mapped_count(self) -> int:
        with self._lock:
            return len(self._mapped)


class PictureStore:
    """Decoded pictures with a reference count each; at zero the surface is unmapped."""

    def __init__(self, table: SurfaceTable) -> None:
        self.table = table
        self._live: Dict[int, Surface] = {}

    def admit(self, params: PicParams) -> Optional[Surface]:
        """A surface with one reference, which is the caller's; ended with drop()."""
        surface = self.table.map_surface(params.pic_idx)  # clean: handed to the caller, unmapped by drop
        if surface is None:
            return None
        surface.refs = 1
        surface.poc = params.poc
        self._live[params.pic_idx] = surface
        return surface

    def retain(self, pic_idx: int) -> Surface:
        surface = self._live[pic_idx]
        surface.refs += 1
        return surface

    def drop(self, surface: Surface) -> None:
        surface.refs -= 1
        if surface.refs == 0:
            self._live.pop(surface.pic_idx, None)
            self.table.unmap_surface(surface)


def checksum(surface: Surface, height: int) -> int:
    acc = 0
    for row in range(height):
        acc = (acc * 31 + surface.devptr + row * surface.pitch) & 0xFFFFFFFF
    return acc


class DisplayQueue:
    """Reorders pictures by POC. push() takes the reference over; pop() hands it out."""

    def __init__(self, store: PictureStore, depth: int) -> None:
        self.store = store
        self.depth = depth
        self._heap: List[Surface] = []

    def push(self, surface: Surface) -> None:
        heapq.heappush(self._heap, surface)

    def pop(self) -> Optional[Surface]:
        if not self._heap:
            return None
        return heapq.heappop(self._heap)

    def full(self) -> bool:
        return len(self._heap) >= self.depth

    def flush(self) -> None:
        while self._heap:
            self.store.drop(heapq.heappop(self._heap))


class Decoder:
    def __init__(self, store: PictureStore, display: DisplayQueue) -> None:
        self.store = store
        self.display = display
        self.skipped = 0
        self.history: List[int] = []

    def decode(self, params: PicParams) -> bool:
        surface = self.store.admit(params)  # clean: near miss, dropped when nobody shows it, else queued
        if surface is None:
            self.skipped += 1
            return False
        self.history.append(surface.poc)
        if params.poc < 0:
            self.store.drop(surface)
            return True
        self.display.push(surface)
        return True

    def decode_intra_only(self, params: PicParams) -> bool:
        surface = self.store.admit(params)  # leak: a picture with references returns False while held
        if surface is None:
            self.skipped += 1
            return False
        if params.refs:
            log.debug("inter picture %d in an intra-only stream", params.poc)
            return False
        self.display.push(surface)
        return True

    def predict(self, params: PicParams) -> int:
        """Motion-compensates from the references and returns a cost."""
        held = []
        cost = 0
        for idx in params.refs:
            ref = self.store.retain(idx)  # clean: collected in `held`, dropped below
            held.append(ref)
            cost += checksum(ref, 16) & 0xFF
        for ref in held:
            self.store.drop(ref)
        return cost

    def predict_bidirectional(self, params: PicParams) -> int:
        back, ahead = params.refs[0], params.refs[-1]
        l0 = self.store.retain(back)  # clean: dropped on both ways
        l1 = self.store.retain(ahead)  # leak: kept when the block is static
        diff = abs(checksum(l0, 16) - checksum(l1, 16))
        if diff == 0:
            self.store.drop(l0)
            return 0
        cost = diff & 0xFFF
        self.store.drop(l1)
        self.store.drop(l0)
        return cost

    def best_reference(self, params: PicParams) -> Optional[Surface]:
        """The cheapest reference, with a count for the caller."""
        best: Optional[Surface] = None
        best_cost = 1 << 30
        for idx in params.refs:
            cand = self.store.retain(idx)  # clean: the loser of each comparison is dropped
            cost = checksum(cand, 8)
            if cost < best_cost:
                cand, best = best, cand
                best_cost = cost
            if cand is not None:
                self.store.drop(cand)
        return best

    def motion_hint(self, params: PicParams) -> int:
        ref = self.best_reference(params)  # leak: only its address is used, the count is never given back
        if ref is None:
            return 0
        hint = (ref.devptr >> 8) & 0x7F
        self.history.append(hint)
        return hint


def present_next(queue: DisplayQueue, sink) -> bool:
    surface = queue.pop()  # clean: dropped after presenting
    if surface is None:
        return False
    sink.present(surface.devptr, surface.pitch)
    queue.store.drop(surface)
    return True


def drop_late(queue: DisplayQueue, now_poc: int) -> int:
    """Takes pictures that are too late out of the queue."""
    late = 0
    while True:
        surface = queue.pop()  # leak: a late picture leaves the queue and its count is not given back
        if surface is None:
            return late
        if surface.poc >= now_poc:
            queue.push(surface)
            return late
        late += 1


def trim(queue: DisplayQueue, keep: int) -> int:
    kept: List[Surface] = []
    removed = 0
    while True:
        surface = queue.pop()  # clean: near miss, pushed back below or dropped here
        if surface is None:
            break
        if len(kept) < keep:
            kept.append(surface)
        else:
            queue.store.drop(surface)
            removed += 1
    for surface in kept:
        queue.push(surface)
    return removed


class OverlayRenderer:
    """Keeps the surface it draws on between begin() and end()."""

    def __init__(self, table: SurfaceTable) -> None:
        self.table = table
        self.canvas: Optional[Surface] = None
        self.mask: Optional[Surface] = None

    def begin(self, pic_idx: int, with_mask: bool) -> bool:
        self.canvas = self.table.map_surface(pic_idx)  # clean: unmapped by end(), or here without a mask
        if self.canvas is None:
            return False
        if with_mask:
            self.mask = self.table.map_surface(pic_idx + 1000)  # leak: end() unmaps the canvas only
            if self.mask is None:
                self.table.unmap_surface(self.canvas)
                self.canvas = None
                return False
        return True

    def draw(self, glyphs: List[int]) -> int:
        drawn = 0
        for g in glyphs:
            if self.mask is None or g & 1:
                drawn += 1
        return drawn

    def end(self) -> None:
        if self.canvas is not None:
            self.table.unmap_surface(self.canvas)
        self.canvas = None
        self.mask = None
