"""Shared memory frame ring between the video decoder and the detector."""
from __future__ import annotations

import enum
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Callable, Iterable, Iterator

import numpy as np


class PixFmt(enum.Enum):
    RGB24 = 3
    GRAY8 = 1


@dataclass
class Frame:
    slot: int
    pts: int
    view: np.ndarray
    fmt: PixFmt = PixFmt.RGB24
    keyframe: bool = False


class FrameArena:
    """Slots of equal size in one shared segment; a bitmap says which are taken."""

    def __init__(self, name: str, slots: int, height: int, width: int) -> None:
        self.shape = (height, width, 3)
        self.slots = slots
        self._bytes = height * width * 3
        self._shm = shared_memory.SharedMemory(name=name, create=True, size=slots * self._bytes)  # clean: closed and unlinked by destroy
        self._used = 0

    def grab(self, pts: int) -> Frame | None:
        for slot in range(self.slots):
            if not self._used >> slot & 1:
                self._used |= 1 << slot  # clean: slot travels in the returned frame
                off = slot * self._bytes
                view = np.ndarray(self.shape, np.uint8, self._shm.buf, off)
                return Frame(slot, pts, view)
        return None

    def drop(self, frame: Frame) -> None:
        self._used &= ~(1 << frame.slot)

    def in_use(self) -> int:
        return self._used.bit_count()

    def destroy(self) -> None:
        self._shm.close()
        self._shm.unlink()


class Decoder:
    def __init__(self, arena: FrameArena, source: Iterable[tuple[int, bytes]]) -> None:
        self.arena = arena
        self.source = source
        self.dropped = 0

    def frames(self) -> Iterator[Frame]:
        for pts, packet in self.source:
            frame = self.arena.grab(pts)  # leak: continue on a short packet keeps the slot
            if frame is None:
                self.dropped += 1
                continue
            data = np.frombuffer(packet, np.uint8)
            if data.size != frame.view.size:
                self.dropped += 1
                continue
            frame.view[...] = data.reshape(frame.view.shape)
            yield frame

    def thumbnail(self, pts: int, packet: bytes, step: int = 8) -> np.ndarray | None:
        frame = self.arena.grab(pts)  # clean: near miss, a copy is returned and the slot dropped
        if frame is None:
            return None
        data = np.frombuffer(packet, np.uint8)
        frame.view.reshape(-1)[: data.size] = data
        small = frame.view[::step, ::step].copy()
        self.arena.drop(frame)
        return small

    def gray(self, frame: Frame) -> Frame | None:
        out = self.arena.grab(frame.pts)  # clean: returned to the caller
        if out is None:
            return None
        out.view[..., 0] = frame.view.mean(axis=2)
        out.fmt = PixFmt.GRAY8
        return out


class Detector:
    def __init__(self, arena: FrameArena, decoder: Decoder, net: Callable[[np.ndarray], list]) -> None:
        self.arena = arena
        self.decoder = decoder
        self.net = net
        self.reference: Frame | None = None
        self.tracks: dict[int, list] = {}

    def run(self) -> int:
        n = 0
        for frame in self.decoder.frames():  # clean: every frame is dropped in the finally
            try:
                boxes = self.net(frame.view)
                if not boxes:
                    continue
                self.tracks[frame.pts] = boxes
                n += 1
            finally:
                self.arena.drop(frame)
        return n

    def until_first_hit(self) -> int | None:
        for frame in self.decoder.frames():  # leak: return on the first hit keeps its frame
            if self.net(frame.view):
                return frame.pts
            self.arena.drop(frame)
        return None

    def motion(self, frame: Frame) -> float:
        gray = self.decoder.gray(frame)  # clean: dropped below
        if gray is None:
            return 0.0
        if self.reference is None:
            value = 0.0
        else:
            a = gray.view[..., 0].astype(np.int16)
            value = float(np.abs(a - self.reference.view[..., 0]).mean())
        self.arena.drop(gray)
        return value

    def set_reference(self, frame: Frame) -> bool:
        gray = self.decoder.gray(frame)  # clean: near miss, swapped in, the old reference is dropped first
        if gray is None:
            return False
        if self.reference is not None:
            self.arena.drop(self.reference)
        self.reference = gray
        return True

    def refresh_reference(self, frame: Frame) -> None:
        if not frame.keyframe:
            return
        self.reference = self.decoder.gray(frame)  # leak: overwrites the reference frame still holding a slot

    def brightness(self, frame: Frame) -> float:
        gray = self.decoder.gray(frame)  # leak: only the low arm drops the gray frame
        if gray is None:
            return -1.0
        level = float(gray.view[..., 0].mean())
        if level < 16.0:
            self.arena.drop(gray)
            return 0.0
        return level / 255.0

    def close(self) -> None:
        if self.reference is not None:
            self.arena.drop(self.reference)
            self.reference = None
        self.arena.destroy()
