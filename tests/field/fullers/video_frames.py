"""Frame sampling for the video-language encoder, over a ring of reusable frames."""
from __future__ import annotations

import contextlib
from collections import deque
from typing import Deque, Iterator, List, Optional


class DecodeError(Exception):
    pass


class Frame:
    __slots__ = ("pts", "data")

    def __init__(self) -> None:
        self.pts = 0
        self.data = bytearray(16)

    def fill(self, pts: int) -> None:
        if pts % 97 == 96:
            raise DecodeError(f"corrupt packet at {pts}")
        self.pts = pts
        self.data[:] = bytes([pts & 0xFF]) * len(self.data)

    def sharpness(self) -> int:
        return (self.pts * 37) % 101


class FrameRing:
    def __init__(self, n: int) -> None:
        self._free: List[Frame] = [Frame() for _ in range(n)]

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> Frame:
        if not self._free:
            raise RuntimeError("frame ring exhausted")
        return self._free.pop()

    def recycle(self, frame: Frame) -> None:
        self._free.append(frame)


class FrameLease:
    """Holds one frame for the length of a with block."""

    def __init__(self, ring: FrameRing) -> None:
        self.ring = ring
        self.frame: Optional[Frame] = None

    def __enter__(self) -> Frame:
        self.frame = self.ring.take()  # leak: __exit__ leaves before the recycle when the block raised
        return self.frame

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None:
            return issubclass(exc_type, DecodeError)
        self.ring.recycle(self.frame)
        self.frame = None
        return False


class TolerantLease:
    def __init__(self, ring: FrameRing) -> None:
        self.ring = ring
        self.frame: Optional[Frame] = None

    def __enter__(self) -> Frame:
        self.frame = self.ring.take()  # clean: near miss, __exit__ recycles it before it looks at the exception
        return self.frame

    def __exit__(self, exc_type, exc, tb) -> bool:
        frame, self.frame = self.frame, None
        self.ring.recycle(frame)
        if exc_type is None:
            return False
        return issubclass(exc_type, DecodeError)


@contextlib.contextmanager
def scratch_frame(ring: FrameRing) -> Iterator[Frame]:
    frame = ring.take()  # leak: no finally, and thumbnail survives a decode error raised in the block
    yield frame
    ring.recycle(frame)


@contextlib.contextmanager
def working_frame(ring: FrameRing) -> Iterator[Frame]:
    frame = ring.take()  # clean: recycled by the finally
    try:
        yield frame
    finally:
        ring.recycle(frame)


class VideoReader:
    def __init__(self, ring: FrameRing, length: int) -> None:
        self.ring = ring
        self.length = length

    def frames(self) -> Iterator[Frame]:
        """Yields frames that the consumer has to recycle."""
        for pts in range(self.length):
            frame = self.ring.take()  # clean: handed to the consumer
            frame.fill(pts)
            yield frame

    def peek_frames(self) -> Iterator[Frame]:
        """Yields one frame over and over; it is valid until the next step."""
        frame = self.ring.take()  # clean: near miss, recycled by the finally when the generator ends or closes
        try:
            for pts in range(self.length):
                frame.fill(pts)
                yield frame
        finally:
            self.ring.recycle(frame)

    def sample(self, stride: int) -> List[bytes]:
        out: List[bytes] = []
        for frame in self.frames():  # leak: frames between two strides are skipped without recycle
            if frame.pts % stride:
                continue
            out.append(bytes(frame.data))
            self.ring.recycle(frame)
        return out

    def sample_even(self, stride: int) -> List[bytes]:
        out: List[bytes] = []
        for frame in self.frames():  # clean: near miss, recycled before the continue as well
            if frame.pts % stride:
                self.ring.recycle(frame)
                continue
            out.append(bytes(frame.data))
            self.ring.recycle(frame)
        return out

    def sharpest(self) -> Optional[Frame]:
        best: Optional[Frame] = None
        for frame in self.frames():  # leak: the former best is lost when a sharper frame is bound
            if best is None or frame.sharpness() > best.sharpness():
                best = frame
            else:
                self.ring.recycle(frame)
        return best

    def darkest(self) -> Optional[Frame]:
        best: Optional[Frame] = None
        for frame in self.frames():  # clean: near miss, the loser of each comparison is recycled, the winner returned
            if best is None:
                best = frame
            elif frame.data[0] < best.data[0]:
                self.ring.recycle(best)
                best = frame
            else:
                self.ring.recycle(frame)
        return best

    def poster(self) -> bytes:
        frame = self.darkest()  # clean: None-checked and recycled
        if frame is None:
            return b""
        image = bytes(frame.data)
        self.ring.recycle(frame)
        return image

    def motion(self, width: int) -> List[int]:
        window: Deque[Frame] = deque(maxlen=width)
        scores: List[int] = []
        for frame in self.frames():  # leak: the bounded deque drops its oldest frame on append
            window.append(frame)
            if len(window) == width:
                scores.append(window[-1].data[0] - window[0].data[0])
        for frame in window:
            self.ring.recycle(frame)
        return scores

    def drift(self, width: int) -> List[int]:
        window: Deque[Frame] = deque()
        scores: List[int] = []
        for frame in self.frames():  # clean: the oldest is popped and recycled, the rest after the loop
            window.append(frame)
            if len(window) == width:
                scores.append(frame.data[0] - window[0].data[0])
                self.ring.recycle(window.popleft())
        while window:
            self.ring.recycle(window.popleft())
        return scores

    def thumbnail(self, pts: int) -> Optional[bytes]:
        try:
            with scratch_frame(self.ring) as frame:  # clean: the with block is right, the manager is at fault
                frame.fill(pts)
                return bytes(frame.data[:4])
        except DecodeError:
            return None

    def preview(self, pts: int) -> Optional[bytes]:
        try:
            with working_frame(self.ring) as frame:  # clean: the context manager recycles it
                frame.fill(pts)
                return bytes(frame.data[:4])
        except DecodeError:
            return None

    def checksum(self, upto: int) -> int:
        total = 0
        for pts in range(upto):
            with TolerantLease(self.ring) as frame:  # clean: released by the with block
                frame.fill(pts)
                total += sum(frame.data)
        return total

    def corrupt_count(self, upto: int) -> int:
        good = 0
        for pts in range(upto):
            with FrameLease(self.ring) as frame:  # clean: the with block is right, the class is at fault
                frame.fill(pts)
                good += 1
        return upto - good

    def collage(self, marks: List[int]) -> bytes:
        with contextlib.ExitStack() as stack:
            held: List[Frame] = []
            for pts in marks:
                frame = self.ring.take()  # clean: near miss, the exit stack recycles it
                stack.callback(self.ring.recycle, frame)
                frame.fill(pts)
                held.append(frame)
            return b"".join(bytes(f.data[:2]) for f in held)

    def first_after(self, start: int) -> Optional[int]:
        for frame in self.frames():  # leak: the frame that ends the search is not recycled
            if frame.pts >= start:
                return frame.pts
            self.ring.recycle(frame)
        return None


def main() -> None:
    ring = FrameRing(12)
    reader = VideoReader(ring, 40)
    assert len(reader.sample_even(4)) == 10
    assert len(reader.drift(5)) == 36
    assert reader.poster() and reader.preview(96) is None
    assert reader.collage([1, 2, 3]) == b"\1\1\2\2\3\3"
    reader.checksum(100)
    assert sum(1 for _ in reader.peek_frames()) == 40
    assert len(ring) == 12


if __name__ == "__main__":
    main()
