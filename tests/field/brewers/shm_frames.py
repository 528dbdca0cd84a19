"""Camera frames in shared memory between capture, preprocess and inference."""
from __future__ import annotations

import queue
import threading
import weakref
from typing import Callable, List, Optional, Tuple

try:
    import torch
except ImportError:  # pragma: no cover
    torch = None

Sink = Callable[["FrameRef"], None]


class FrameRef:
    """A claim on one ring cell. drop() hands the cell back."""

    def __init__(self, ring: "FrameRing", cell: int) -> None:
        self.ring = ring
        self.cell = cell
        self.seq = -1
        self.size = 0
        self._dropped = False

    def view(self) -> memoryview:
        return self.ring.window(self.cell)[: self.size or None]

    def drop(self) -> None:
        if not self._dropped:
            self._dropped = True
            self.ring._recycle(self.cell)

    def tensor(self):
        if torch is None:
            return bytes(self.view())
        return torch.frombuffer(bytearray(self.view()), dtype=torch.uint8)


class FrameRing:
    def __init__(self, cells: int, cell_size: int) -> None:
        self.cell_size = cell_size
        self._mem = memoryview(bytearray(cells * cell_size))
        self._free: "queue.Queue[int]" = queue.Queue()
        for c in range(cells):
            self._free.put(c)

    def window(self, cell: int) -> memoryview:
        return self._mem[cell * self.cell_size:(cell + 1) * self.cell_size]

    def claim(self, timeout: Optional[float] = None) -> Optional[FrameRef]:
        try:
            cell = self._free.get(timeout=timeout) if timeout else self._free.get_nowait()
        except queue.Empty:
            return None
        return FrameRef(self, cell)

    def _recycle(self, cell: int) -> None:
        self._free.put(cell)

    def idle(self) -> int:
        return self._free.qsize()


class Capture:
    """Fills frames from a device callback and passes them to the sinks."""

    def __init__(self, ring: FrameRing) -> None:
        self.ring = ring
        self.seq = 0
        self.dropped = 0
        self._outbox: "queue.Queue[FrameRef]" = queue.Queue(maxsize=4)
        self._held: Optional[FrameRef] = None

    def on_packet(self, payload: bytes) -> bool:
        ref = self.ring.claim()  # leak: outbox full, the frame is counted as dropped but never handed back
        if ref is None:
            self.dropped += 1
            return False
        ref.view()[: len(payload)] = payload
        ref.size = len(payload)
        ref.seq = self.seq
        self.seq += 1
        try:
            self._outbox.put_nowait(ref)
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def on_keyframe(self, payload: bytes) -> bool:
        ref = self.ring.claim()  # clean: near miss, Full is caught and the frame dropped there
        if ref is None:
            return False
        ref.view()[: len(payload)] = payload
        ref.size = len(payload)
        try:
            self._outbox.put(ref, timeout=0.01)
        except queue.Full:
            ref.drop()
            return False
        return True

    def next_frame(self) -> Optional[FrameRef]:
        try:
            return self._outbox.get_nowait()
        except queue.Empty:
            return None

    def begin(self) -> None:
        if self._held is not None:
            self._held.drop()
        self._held = self.ring.claim(timeout=0.01)  # clean: near miss, the old one is dropped before it is overwritten

    def append(self, part: bytes) -> None:
        if self._held is None:
            return
        end = self._held.size + len(part)
        self.ring.window(self._held.cell)[self._held.size:end] = part
        self._held.size = end

    def commit(self, sink: Sink) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        try:
            sink(held)
        finally:
            held.drop()


class Preprocess:
    def __init__(self, ring: FrameRing, min_size: int) -> None:
        self.ring = ring
        self.min_size = min_size
        self.finalizers: List[weakref.finalize] = []

    def scaled(self, src: FrameRef) -> Optional[FrameRef]:
        """A half-size copy in its own cell, the caller's to drop."""
        dst = self.ring.claim()  # clean: None-checked, returned to the caller
        if dst is None:
            return None
        dst.size = max(1, src.size // 2)
        dst.view()[:] = src.view()[: dst.size * 2: 2][: dst.size]
        dst.seq = src.seq
        return dst

    def pyramid(self, src: FrameRef, levels: int) -> List[FrameRef]:
        out: List[FrameRef] = []
        level = src
        for _ in range(levels):
            nxt = self.scaled(level)  # clean: near miss, on shortage all levels so far are dropped
            if nxt is None:
                for ref in out:
                    ref.drop()
                return []
            out.append(nxt)
            level = nxt
        return out

    def quarter(self, src: FrameRef) -> Optional[FrameRef]:
        ref = self.scaled(src)  # leak: the half-size frame is rebound to the quarter
        if ref is None:
            return None
        ref = self.scaled(ref)  # clean: returned to the caller
        return ref

    def thumbnail(self, src: FrameRef) -> bytes:
        small = self.scaled(src)  # leak: below min_size returns b"" without the drop
        if small is None:
            return b""
        if small.size < self.min_size:
            return b""
        data = bytes(small.view())
        small.drop()
        return data

    def thumbnails(self, frames: List[FrameRef]) -> List[bytes]:
        thumbs: List[bytes] = []
        for frame in frames:
            small = self.scaled(frame)  # clean: dropped in finally, continue or not
            if small is None:
                break
            try:
                if small.size < self.min_size:
                    continue
                thumbs.append(bytes(small.view()))
            finally:
                small.drop()
        return thumbs

    def as_tensor(self, src: FrameRef):
        return self.scaled(src).tensor()  # leak: the scaled frame is copied into a tensor and dropped on the floor

    def lend(self, src: FrameRef) -> Optional[memoryview]:
        ref = self.scaled(src)  # clean: near miss, the finalizers in the list drop it, detach_all runs them
        if ref is None:
            return None
        self.finalizers.append(weakref.finalize(src, ref.drop))
        return ref.view()

    def detach_all(self) -> None:
        while self.finalizers:
            self.finalizers.pop()()

    def stereo(self, left: FrameRef, right: FrameRef) -> Optional[Tuple[bytes, bytes]]:
        a = self.scaled(left)  # clean: dropped both ways
        b = self.scaled(right)  # leak: left side None, returns without dropping the right one
        if a is None:
            return None
        if b is None:
            a.drop()
            return None
        pair = bytes(a.view()), bytes(b.view())
        a.drop()
        b.drop()
        return pair


class Pump(threading.Thread):
    """Moves frames from capture to a sink until told to stop."""

    def __init__(self, cap: Capture, pre: Preprocess, sink: Callable[[bytes], bool]) -> None:
        super().__init__(daemon=True)
        self.cap = cap
        self.pre = pre
        self.sink = sink
        self.halt = threading.Event()

    def run(self) -> None:
        while not self.halt.is_set():
            frame = self.cap.next_frame()  # clean: near miss, an empty frame is dropped before continue
            if frame is None:
                self.halt.wait(0.001)
                continue
            if frame.size == 0:
                frame.drop()
                continue
            ok = self.sink(bytes(frame.view()))
            frame.drop()
            if not ok:
                break


def main() -> None:
    ring = FrameRing(8, 64)
    cap, pre = Capture(ring), Preprocess(ring, 2)
    cap.on_keyframe(b"0123456789abcdef")
    frame = cap.next_frame()  # clean: dropped below
    assert frame is not None
    for level in pre.pyramid(frame, 3):
        print(bytes(level.view()))
        level.drop()
    print(pre.thumbnails([frame]), pre.stereo(frame, frame), pre.lend(frame) is not None)
    pre.detach_all()
    frame.drop()
    cap.begin()
    cap.append(b"xy")
    cap.commit(lambda ref: print(bytes(ref.view())))
    print(ring.idle())


if __name__ == "__main__":
    main()
