"""CPU offload of KV layers through pinned staging buffers and copy streams."""
from __future__ import annotations

import queue
import threading
from typing import Any, Dict, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None


class PinnedBuf:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        if torch is not None and torch.cuda.is_available():
            self.data = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            self.data = bytearray(nbytes)

    def fill(self, src: Any) -> None:
        self.data[: len(src)] = src

    def view(self, n: int) -> Any:
        return self.data[:n]


class PinnedArena:
    """Fixed number of equal staging buffers behind a condition variable."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._cv = threading.Condition()
        self._bufs: List[PinnedBuf] = [PinnedBuf(nbytes) for _ in range(count)]

    def checkout(self, timeout: Optional[float] = None) -> Optional[PinnedBuf]:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._bufs), timeout):
                return None
            return self._bufs.pop()

    def checkin(self, buf: PinnedBuf) -> None:
        with self._cv:
            self._bufs.append(buf)
            self._cv.notify()


class CopyStreams:
    """Side streams in a queue; a borrowed stream must be handed back."""

    def __init__(self, n: int) -> None:
        self._q: "queue.Queue[Any]" = queue.Queue()
        for i in range(n):
            self._q.put(torch.cuda.Stream() if torch is not None and torch.cuda.is_available() else f"stream{i}")

    def borrow(self) -> Any:
        return self._q.get()

    def hand_back(self, stream: Any) -> None:
        self._q.put(stream)


class LayerOffloader:
    def __init__(self, arena: PinnedArena, streams: CopyStreams, copier: Any) -> None:
        self.arena = arena
        self.streams = streams
        self.copier = copier
        self.inflight: List[Tuple[int, PinnedBuf, Any]] = []
        self.on_host: Dict[int, PinnedBuf] = {}

    def offload(self, layer: int, src: Any) -> bool:
        buf = self.arena.checkout(timeout=0.1)  # clean: queued in inflight, lands in on_host
        if buf is None:
            return False
        stream = self.streams.borrow()  # clean: queued in inflight, handed back by reap
        self.copier.d2h(src, buf, stream)
        self.inflight.append((layer, buf, stream))
        return True

    def reap(self) -> int:
        still: List[Tuple[int, PinnedBuf, Any]] = []
        for layer, buf, stream in self.inflight:
            if not self.copier.done(stream):
                still.append((layer, buf, stream))
                continue
            self.streams.hand_back(stream)
            old = self.on_host.pop(layer, None)
            if old is not None:
                self.arena.checkin(old)
            self.on_host[layer] = buf
        finished = len(self.inflight) - len(still)
        self.inflight = still
        return finished

    def drop(self, layer: int) -> None:
        buf = self.on_host.pop(layer, None)
        if buf is not None:
            self.arena.checkin(buf)

    def fetch(self, layer: int, dst: Any) -> bool:
        stream = self.streams.borrow()  # leak: layer is not on host, returns holding the stream
        buf = self.on_host.get(layer)
        if buf is None:
            return False
        self.copier.h2d(buf, dst, stream)
        self.streams.hand_back(stream)
        return True

    def mirror(self, layer: int, src: bytes) -> Optional[bytes]:
        """Stage a host copy and return a private one."""
        buf = self.arena.checkout()  # clean: near miss, checkout without timeout cannot be None and the copy is taken first
        buf.fill(src)
        out = bytes(buf.view(len(src)))
        self.arena.checkin(buf)
        return out

    def stage(self, src: bytes) -> PinnedBuf:
        buf = self.arena.checkout()  # clean: returned to the caller
        buf.fill(src)
        return buf

    def digest(self, src: bytes) -> int:
        return sum(self.stage(src).view(len(src))) & 0xFFFFFFFF  # leak: staged buffer is an unnamed temporary, never checked in

    def write_through(self, layer: int, src: bytes, sink: Any) -> int:
        buf = self.stage(src)  # leak: failed write is caught and answered with 0, buffer stays out
        try:
            n = sink.write(buf.view(len(src)))
        except OSError:
            return 0
        self.arena.checkin(buf)
        return n

    def swap_pair(self, a: bytes, b: bytes) -> Optional[Tuple[bytes, bytes]]:
        first = self.arena.checkout(timeout=0.1)  # clean: checked in on both ways
        if first is None:
            return None
        second = self.arena.checkout(timeout=0.1)  # clean: near miss, released in reverse order below
        if second is None:
            self.arena.checkin(first)
            return None
        first.fill(a)
        second.fill(b)
        out = bytes(second.view(len(b))), bytes(first.view(len(a)))
        self.arena.checkin(second)
        self.arena.checkin(first)
        return out


class PrefetchThread(threading.Thread):
    """Reads layers ahead of the compute stream."""

    def __init__(self, arena: PinnedArena, source: Any, depth: int) -> None:
        super().__init__(daemon=True)
        self.arena = arena
        self.source = source
        self.ready: "queue.Queue[Tuple[int, PinnedBuf]]" = queue.Queue(depth)
        self.stop = threading.Event()

    def run(self) -> None:
        for layer in self.source.order():
            if self.stop.is_set():
                return
            buf = self.arena.checkout()  # leak: full queue is survived with `continue`, the buffer is lost
            buf.fill(self.source.read(layer))
            try:
                self.ready.put((layer, buf), timeout=1.0)
            except queue.Full:
                continue

    def consume(self, dst: Any) -> int:
        layer, buf = self.ready.get()
        dst.copy_from(buf)
        self.arena.checkin(buf)
        return layer
