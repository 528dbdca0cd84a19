"""Video preview pipeline: decoded frames come from one arena, pass through filters and end in a contact sheet."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Iterable, Iterator, Optional, Protocol

log = logging.getLogger("preview")


@dataclass
class Frame:
    slot: int
    width: int = 0
    height: int = 0
    pts: float = 0.0
    luma: bytearray = field(default_factory=bytearray)

    def mean(self) -> float:
        return sum(self.luma) / len(self.luma) if self.luma else 0.0


class FrameArena:
    """A fixed number of frames; take() gives None where all are out."""

    def __init__(self, slots: int) -> None:
        self._frames = [Frame(i) for i in range(slots)]
        self._free = deque(range(slots))

    def take(self, width: int, height: int) -> Optional[Frame]:
        if not self._free:
            return None
        frame = self._frames[self._free.popleft()]
        frame.width, frame.height = width, height
        frame.luma = bytearray(width * height)
        return frame

    def put(self, frame: Frame) -> None:
        frame.luma = bytearray()
        self._free.append(frame.slot)

    @property
    def free(self) -> int:
        return len(self._free)


class Packet(Protocol):
    pts: float
    width: int
    height: int
    data: bytes
    corrupt: bool


def decode(arena: FrameArena, packets: Iterable[Packet]) -> Iterator[Frame]:
    """Yields frames that the consumer must put back."""
    for packet in packets:
        frame = arena.take(packet.width, packet.height)  # leak: a corrupt packet continues with the frame out
        if frame is None:
            log.warning("arena exhausted at %.2f", packet.pts)
            return
        if packet.corrupt:
            log.info("corrupt packet at %.2f", packet.pts)
            continue
        frame.pts = packet.pts
        frame.luma[: len(packet.data)] = packet.data
        yield frame


def decode_keyframes(arena: FrameArena, packets: Iterable[Packet], every: float) -> Iterator[Frame]:
    last = -every
    for packet in packets:
        if packet.corrupt or packet.pts - last < every:
            continue
        frame = arena.take(packet.width, packet.height)  # clean: near miss, yielded to the consumer or put back
        if frame is None:
            return
        if len(packet.data) > len(frame.luma):
            arena.put(frame)
            continue
        frame.pts = last = packet.pts
        frame.luma[: len(packet.data)] = packet.data
        yield frame


def halve(arena: FrameArena, source: Frame) -> Optional[Frame]:
    """A new frame of half the size; the source stays with the caller."""
    target = arena.take(source.width // 2, source.height // 2)  # clean: handed to the caller
    if target is None:
        return None
    for y in range(target.height):
        for x in range(target.width):
            target.luma[y * target.width + x] = source.luma[2 * y * source.width + 2 * x]
    target.pts = source.pts
    return target


def shrink(arena: FrameArena, frame: Frame, limit: int) -> Frame:
    """Consumes frame and returns one that is at most limit wide."""
    while frame.width > limit:
        smaller = halve(arena, frame)  # clean: near miss, becomes frame after the old one is put back
        if smaller is None:
            break
        arena.put(frame)
        frame = smaller
    return frame


def shrink_all(arena: FrameArena, frames: Iterable[Frame], limit: int) -> Iterator[bytes]:
    for frame in frames:
        small = halve(arena, frame)  # leak: where it fits the limit the bytes are yielded and it is not put back
        arena.put(frame)
        if small is None:
            continue
        if small.width <= limit:
            yield bytes(small.luma)
            continue
        smaller = shrink(arena, small, limit)  # clean: consumes small, put back below
        picture = bytes(smaller.luma)
        arena.put(smaller)
        yield picture


class SceneDetector:
    def __init__(self, arena: FrameArena, threshold: float) -> None:
        self.arena = arena
        self.threshold = threshold
        self._reference: Optional[Frame] = None
        self._backlog: list[Frame] = []

    def cuts(self, width: int, height: int, planes: Iterable[bytes]) -> list[int]:
        """Indices at which the mean brightness jumps."""
        found: list[int] = []
        previous: Optional[Frame] = None
        for index, plane in enumerate(planes):
            frame = self.arena.take(width, height)  # leak: previous is rebound without a put
            if frame is None:
                break
            frame.luma[:] = plane
            if previous is not None and abs(frame.mean() - previous.mean()) > self.threshold:
                found.append(index)
            previous = frame
        if previous is not None:
            self.arena.put(previous)
        return found

    def fades(self, width: int, height: int, planes: Iterable[bytes]) -> int:
        count = 0
        previous: Optional[Frame] = None
        for plane in planes:
            frame = self.arena.take(width, height)  # clean: near miss, previous is put back before it is rebound
            if frame is None:
                break
            frame.luma[:] = plane
            if previous is not None:
                count += frame.mean() < previous.mean()
                self.arena.put(previous)
            previous = frame
        if previous is not None:
            self.arena.put(previous)
        return count

    def remember(self, plane: bytes, width: int, height: int) -> bool:
        fresh = self.arena.take(width, height)  # clean: near miss, replaces a reference that is put back first
        if fresh is None:
            return False
        fresh.luma[:] = plane
        if self._reference is not None:
            self.arena.put(self._reference)
        self._reference = fresh
        return True

    def hold(self, plane: bytes, width: int, height: int) -> bool:
        frame = self.arena.take(width, height)  # leak: close() clears the backlog without putting the frames back
        if frame is None:
            return False
        frame.luma[:] = plane
        self._backlog.append(frame)
        return True

    def backlog_mean(self) -> float:
        if not self._backlog:
            return 0.0
        return sum(f.mean() for f in self._backlog) / len(self._backlog)

    def close(self) -> None:
        if self._reference is not None:
            self.arena.put(self._reference)
            self._reference = None
        self._backlog.clear()


class ContactSheet:
    def __init__(self, arena: FrameArena, columns: int) -> None:
        self.arena = arena
        self.columns = columns
        self.tiles: list[Frame] = []

    def fill(self, packets: Iterable[Packet]) -> int:
        for frame in decode_keyframes(self.arena, packets, 10.0):  # clean: near miss, tiles are put back by render()
            self.tiles.append(shrink(self.arena, frame, 160))  # clean: near miss, tiles are put back by render()
            if len(self.tiles) == self.columns ** 2:
                break
        return len(self.tiles)

    def render(self) -> list[bytes]:
        rows: list[bytes] = []
        while self.tiles:
            tile = self.tiles.pop(0)
            rows.append(bytes(tile.luma))
            self.arena.put(tile)
        return rows

    def brightest(self, packets: Iterable[Packet]) -> Optional[float]:
        best: Optional[float] = None
        for frame in decode_keyframes(self.arena, packets, 1.0):  # leak: put back only where it beats the best
            mean = frame.mean()
            if best is None or mean > best:
                best = mean
                self.arena.put(frame)
        return best

    def durations(self, packets: Iterable[Packet]) -> list[float]:
        marks: list[float] = []
        for frame in decode(self.arena, packets):  # clean: each frame is put back
            marks.append(frame.pts)
            self.arena.put(frame)
        return [b - a for a, b in zip(marks, marks[1:])]
