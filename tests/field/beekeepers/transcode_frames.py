"""Filter graph of a transcoder. Frames come from a fixed pool and carry a reference count."""
from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Callable, Iterator, Optional, Protocol

log = logging.getLogger("transcode")


class VideoFrame:
    def __init__(self, pool: "FramePool", index: int, width: int, height: int) -> None:
        self.pool = pool
        self.index = index
        self.plane = bytearray(width * height * 3 // 2)
        self.refs = 0
        self.pts = -1
        self.keyframe = False

    def ref(self) -> "VideoFrame":
        self.refs += 1
        return self

    def unref(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.pool._put(self)


class FramePool:
    def __init__(self, count: int, width: int, height: int) -> None:
        self._lock = threading.Lock()
        self._free = deque(VideoFrame(self, i, width, height) for i in range(count))

    def obtain(self) -> Optional[VideoFrame]:
        """A frame with one reference, or None when the pool is empty."""
        with self._lock:
            if not self._free:
                return None
            frame = self._free.popleft()
        frame.refs = 1
        frame.pts = -1
        frame.keyframe = False
        return frame

    def _put(self, frame: VideoFrame) -> None:
        with self._lock:
            self._free.append(frame)


class Packet:
    def __init__(self, pts: int, data: bytes, corrupt: bool = False) -> None:
        self.pts = pts
        self.data = data
        self.corrupt = corrupt


class Stage(Protocol):
    def feed(self, frame: VideoFrame) -> None: ...

    def flush(self) -> None: ...


class Decoder:
    def __init__(self, pool: FramePool, codec) -> None:
        self.pool = pool
        self.codec = codec
        self.dropped = 0

    def decode(self, packet: Packet) -> Optional[VideoFrame]:
        frame = self.pool.obtain()  # leak: a corrupt packet returns None with the frame obtained
        if frame is None:
            self.dropped += 1
            return None
        if packet.corrupt or not self.codec.into(packet.data, frame.plane):
            self.dropped += 1
            return None
        frame.pts = packet.pts
        return frame

    def decode_all(self, packets: list[Packet]) -> Iterator[VideoFrame]:
        for packet in packets:
            frame = self.pool.obtain()  # clean: yielded to the consumer or unreffed
            if frame is None:
                self.dropped += 1
                continue
            if not self.codec.into(packet.data, frame.plane):
                frame.unref()
                continue
            frame.pts = packet.pts
            yield frame

    def preroll(self, packets: list[Packet], until: int) -> Optional[VideoFrame]:
        shown: Optional[VideoFrame] = None
        for frame in self.decode_all(packets):  # clean: near miss, former unreffed, last returned
            if shown is not None:
                shown.unref()
            shown = frame
            if frame.pts >= until:
                break
        return shown


class DelayStage:
    """Holds back a number of frames before passing them on."""

    def __init__(self, depth: int, downstream: Stage) -> None:
        self.depth = depth
        self.downstream = downstream
        self._held: deque[VideoFrame] = deque()

    def feed(self, frame: VideoFrame) -> None:
        self._held.append(frame.ref())  # clean: unreffed when it leaves the line, or by flush
        if len(self._held) > self.depth:
            oldest = self._held.popleft()
            self.downstream.feed(oldest)
            oldest.unref()

    def flush(self) -> None:
        while self._held:
            frame = self._held.popleft()
            self.downstream.feed(frame)
            frame.unref()
        self.downstream.flush()


class ReorderStage:
    """Sorts a window of frames by pts; late frames are thrown away."""

    def __init__(self, window: int, downstream: Stage) -> None:
        self.window = window
        self.downstream = downstream
        self._heap: list[VideoFrame] = []
        self._last = -1

    def feed(self, frame: VideoFrame) -> None:
        self._heap.append(frame.ref())  # leak: a late frame leaves the list in _emit without unref
        self._heap.sort(key=lambda f: f.pts)
        if len(self._heap) > self.window:
            self._emit()

    def _emit(self) -> None:
        frame = self._heap.pop(0)
        if frame.pts <= self._last:
            log.debug("late frame %d", frame.pts)
            return
        self._last = frame.pts
        self.downstream.feed(frame)
        frame.unref()

    def flush(self) -> None:
        while self._heap:
            self._emit()
        self.downstream.flush()


class Deduper:
    """Remembers the previous frame and drops repeats."""

    def __init__(self, downstream: Stage) -> None:
        self.downstream = downstream
        self._previous: Optional[VideoFrame] = None

    def feed(self, frame: VideoFrame) -> None:
        if self._previous is not None:
            if self._previous.plane == frame.plane:
                return
            self._previous.unref()
        self._previous = frame.ref()  # clean: near miss, unreffed by the next feed or by flush
        self.downstream.feed(frame)

    def flush(self) -> None:
        if self._previous is not None:
            self._previous.unref()
            self._previous = None
        self.downstream.flush()


class Thumbnail:
    """Keeps the newest keyframe for the preview endpoint."""

    def __init__(self, downstream: Stage) -> None:
        self.downstream = downstream
        self.poster: Optional[VideoFrame] = None

    def feed(self, frame: VideoFrame) -> None:
        if frame.keyframe:
            self.poster = frame.ref()  # leak: each keyframe overwrites the poster before it
        self.downstream.feed(frame)

    def flush(self) -> None:
        if self.poster is not None:
            self.poster.unref()
            self.poster = None
        self.downstream.flush()


def scale(source: VideoFrame, pool: FramePool, kernel: Callable[[bytearray, bytearray], None]):
    """A scaled copy of source; source is used up."""
    target = pool.obtain()  # clean: returned to the caller
    if target is None:
        source.unref()
        return None
    kernel(source.plane, target.plane)
    target.pts = source.pts
    source.unref()
    return target


def run_graph(decoder: Decoder, packets: list[Packet], small: FramePool, kernel, out: Stage) -> int:
    shown = 0
    for packet in packets:
        frame = decoder.decode(packet)  # clean: near miss, scale() uses it up on both ways
        if frame is None:
            continue
        scaled = scale(frame, small, kernel)  # clean: fed and unreffed
        if scaled is None:
            continue
        out.feed(scaled)
        scaled.unref()
        shown += 1
    out.flush()
    return shown


def average_luma(decoder: Decoder, packets: list[Packet]) -> float:
    total, count = 0, 0
    for packet in packets:
        frame = decoder.decode(packet)  # leak: read only, never unreffed
        if frame is None:
            continue
        total += sum(frame.plane[:1024])
        count += 1
    return total / (1024 * count) if count else 0.0


def blend(pool: FramePool, first: VideoFrame, second: VideoFrame) -> Optional[VideoFrame]:
    mask = pool.obtain()  # leak: stays out when no output frame is to be had
    output = pool.obtain()  # clean: returned, or there is none
    if mask is None or output is None:
        if output is not None:
            output.unref()
        return None
    for i, (a, b) in enumerate(zip(first.plane, second.plane)):
        mask.plane[i] = 255 if a != b else 0
        output.plane[i] = (a + b) // 2 if mask.plane[i] else a
    output.pts = first.pts
    mask.unref()
    return output


def snapshot(stage: Thumbnail, encode: Callable[[bytearray], bytes]) -> Optional[bytes]:
    if stage.poster is None:
        return None
    frame = stage.poster.ref()  # clean: unreffed in the finally
    try:
        return encode(frame.plane)
    finally:
        frame.unref()


def black_frame(pool: FramePool, pts: int, sink: Stage) -> bool:
    frame = pool.obtain()  # clean: fed and unreffed
    if frame is None:
        return False
    frame.plane[:] = bytes(len(frame.plane))
    frame.pts = pts
    sink.feed(frame)
    frame.unref()
    return True
