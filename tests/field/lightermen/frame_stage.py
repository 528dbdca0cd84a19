"""Software decode stage: a fixed set of frame buffers and the steps that pass them along."""
from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, List, Optional, Tuple


@dataclass
class Frame:
    index: int
    data: bytearray
    width: int = 0
    height: int = 0
    pts: int = -1
    keyframe: bool = False


@dataclass
class Packet:
    payload: bytes
    pts: int
    keyframe: bool = False
    corrupt: bool = False
    width: int = 1920
    height: int = 1080


class FramePool:
    """A bounded set of frames. get() blocks, try_get() answers None when the set is empty."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._cond = threading.Condition()
        self._free = deque(Frame(i, bytearray(nbytes)) for i in range(count))
        self._out = {}

    def get(self) -> Frame:
        with self._cond:
            while not self._free:
                self._cond.wait()
            frame = self._free.popleft()
            self._out[frame.index] = frame
            return frame

    def try_get(self) -> Optional[Frame]:
        with self._cond:
            if not self._free:
                return None
            frame = self._free.popleft()
            self._out[frame.index] = frame
            return frame

    def put(self, frame: Frame) -> None:
        with self._cond:
            self._out.pop(frame.index, None)
            frame.pts = -1
            self._free.append(frame)
            self._cond.notify()

    @property
    def in_use(self) -> int:
        with self._cond:
            return len(self._out)


def unpack_into(frame: Frame, packet: Packet) -> bool:
    n = min(len(frame.data), len(packet.payload))
    frame.data[:n] = packet.payload[:n]
    frame.pts = packet.pts
    frame.width, frame.height = packet.width, packet.height
    frame.keyframe = packet.keyframe
    return n > 0 and not packet.corrupt


def decode_one(pool: FramePool, packet: Packet) -> Optional[Frame]:
    """Decodes a packet; the caller puts the frame back."""
    frame = pool.get()  # clean: put back on failure, else handed to the caller
    if not unpack_into(frame, packet):
        pool.put(frame)
        return None
    return frame


def scale_half(pool: FramePool, src: Frame) -> Frame:
    dst = pool.get()  # clean: handed to the caller
    dst.width, dst.height = src.width // 2, src.height // 2
    step = 2
    view = src.data[::step]
    dst.data[: len(view)] = view
    dst.pts = src.pts
    return dst


def luma_histogram(frame: Frame, bins: int = 16) -> List[int]:
    hist = [0] * bins
    for value in frame.data[: frame.width * frame.height]:
        hist[value * bins // 256] += 1
    return hist


def decode_gop(pool: FramePool, packets: Iterable[Packet], sink: Callable[[bytes, int], None]) -> int:
    """Decodes a group of pictures into the sink and returns how many were shown."""
    shown = 0
    seen_key = False
    for packet in packets:
        frame = pool.get()  # leak: the two `continue` for undecodable and leading pictures skip put
        if not unpack_into(frame, packet):
            continue
        seen_key = seen_key or frame.keyframe
        if not seen_key:
            continue
        sink(bytes(frame.data), frame.pts)
        shown += 1
        pool.put(frame)
    return shown


def decode_gop_strict(pool: FramePool, packets: Iterable[Packet], sink: Callable[[bytes, int], None]) -> int:
    shown = 0
    for packet in packets:
        frame = pool.get()  # clean: near miss, the finally runs on continue and on break
        try:
            if not unpack_into(frame, packet):
                continue
            if frame.pts < 0:
                break
            sink(bytes(frame.data), frame.pts)
            shown += 1
        finally:
            pool.put(frame)
    return shown


def newest_frame(pool: FramePool, packets: Iterable[Packet]) -> Optional[Frame]:
    """The last decodable frame of a burst, for a live preview."""
    last: Optional[Frame] = None
    for packet in packets:
        frame = decode_one(pool, packet)  # leak: an earlier frame in `last` is overwritten without put
        if frame is None:
            continue
        if last is not None and frame.pts < last.pts:
            pool.put(frame)
            continue
        last = frame
    return last


def newest_keyframe(pool: FramePool, packets: Iterable[Packet]) -> Optional[Frame]:
    best: Optional[Frame] = None
    for packet in packets:
        frame = decode_one(pool, packet)  # clean: near miss, the earlier one is put before the rebinding
        if frame is None:
            continue
        if not frame.keyframe:
            pool.put(frame)
            continue
        if best is not None:
            pool.put(best)
        best = frame
    return best


def thumbnail(pool: FramePool, src: Frame, levels: int) -> bytes:
    """Halves the picture some times and returns its bytes. The source stays the caller's."""
    small = scale_half(pool, src)  # clean: put when the next level replaces it, or after the copy
    for _ in range(levels - 1):
        smaller = scale_half(pool, small)  # clean: becomes `small`, which is put
        pool.put(small)
        small = smaller
    out = bytes(small.data[: small.width * small.height])
    pool.put(small)
    return out


def poster(pool: FramePool, src: Frame) -> Tuple[bytes, List[int]]:
    half = scale_half(pool, src)  # leak: copied into bytes and dropped, never put
    pixels = bytes(half.data[: half.width * half.height])
    hist = luma_histogram(half)
    return pixels, hist


def weave_fields(pool: FramePool, top: Packet, bottom: Packet) -> Optional[bytes]:
    """Weaves two fields into one picture."""
    first = pool.try_get()  # leak: stays out when the second buffer is not available
    if first is None:
        return None
    second = pool.try_get()  # clean: None, or put below
    if second is None:
        return None
    unpack_into(first, top)
    unpack_into(second, bottom)
    woven = bytearray()
    stride = first.width
    for row in range(first.height // 2):
        woven += first.data[row * stride : (row + 1) * stride]
        woven += second.data[row * stride : (row + 1) * stride]
    pool.put(second)
    pool.put(first)
    return bytes(woven)


def iter_frames(pool: FramePool, packets: Iterable[Packet]) -> Iterator[Frame]:
    """Lends one frame at a time; it is valid until the next step."""
    for packet in packets:
        frame = pool.get()  # clean: the finally runs when the generator moves on or is closed
        try:
            if unpack_into(frame, packet):
                yield frame
        finally:
            pool.put(frame)


def mean_level(pool: FramePool, packets: Iterable[Packet], limit: int) -> float:
    total, n = 0, 0
    for frame in iter_frames(pool, packets):  # clean: near miss, lent by the generator
        total += sum(frame.data[:256])
        n += 256
        if n >= limit:
            break
    return total / n if n else 0.0


class ReferencePicture:
    """Holds the picture that the next P-frames predict from."""

    def __init__(self, pool: FramePool) -> None:
        self.pool = pool
        self._ref: Optional[Frame] = None
        self._golden: Optional[Frame] = None

    def update(self, packet: Packet) -> None:
        frame = decode_one(self.pool, packet)  # leak: when it is golden the old golden is overwritten
        if frame is None:
            return
        if packet.keyframe:
            self._golden = frame
            return
        if self._ref is not None:
            self.pool.put(self._ref)
        self._ref = frame

    def close(self) -> None:
        for frame in (self._ref, self._golden):
            if frame is not None:
                self.pool.put(frame)
        self._ref = self._golden = None
