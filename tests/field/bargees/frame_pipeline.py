"""Decodes, reorders and smooths video frames for a multimodal front end."""
import heapq
from collections import deque
from typing import NamedTuple


class Frame:
    __slots__ = ("data", "pts", "luma")

    def __init__(self, size):
        self.data = bytearray(size)
        self.pts = -1
        self.luma = 0.0


class FramePool:
    def __init__(self, count, size):
        self._spare = [Frame(size) for _ in range(count)]
        self._size = size

    def obtain(self):
        return self._spare.pop() if self._spare else Frame(self._size)

    def recycle(self, frame):
        frame.pts = -1
        self._spare.append(frame)


class Layer(NamedTuple):
    image: Frame
    mask: Frame
    z: int


class Smoother:
    """Mean brightness over the newest `span` frames."""

    def __init__(self, pool, span):
        self._pool = pool
        self._span = span
        self._recent = deque()

    def push(self, packet):
        frame = self._pool.obtain()  # leak: the oldest frame slides out of the window and is dropped
        frame.data[: len(packet)] = packet
        frame.luma = sum(packet) / max(1, len(packet))
        self._recent.append(frame)
        if len(self._recent) > self._span:
            self._recent.popleft()
        return sum(f.luma for f in self._recent) / len(self._recent)

    def close(self):
        while self._recent:
            self._pool.recycle(self._recent.popleft())


class MotionWindow:
    def __init__(self, pool, span):
        self._pool = pool
        self._ring = deque(maxlen=span)

    def push(self, packet, pts):
        frame = self._pool.obtain()  # clean: near miss, the frame about to slide out is recycled first
        frame.data[: len(packet)] = packet
        frame.pts = pts
        if len(self._ring) == self._ring.maxlen:
            self._pool.recycle(self._ring[0])
        self._ring.append(frame)
        return frame.pts - self._ring[0].pts

    def close(self):
        for frame in self._ring:
            self._pool.recycle(frame)
        self._ring.clear()


class SceneCut:
    def __init__(self, pool, lookback):
        self._pool = pool
        self._history = deque(maxlen=lookback)

    def feed(self, packet):
        frame = self._pool.obtain()  # leak: append on a full deque with maxlen throws the oldest frame away
        frame.luma = sum(packet) / max(1, len(packet))
        jump = abs(frame.luma - self._history[-1].luma) if self._history else 0.0
        self._history.append(frame)
        return jump > 40.0

    def close(self):
        while self._history:
            self._pool.recycle(self._history.pop())


class Reorder:
    """Puts frames into presentation order; frames behind the clock are not shown."""

    def __init__(self, pool, sink):
        self._pool = pool
        self._sink = sink
        self._heap = []
        self._audio = []
        self._n = 0

    def add(self, packet, pts):
        frame = self._pool.obtain()  # leak: show pops a frame behind the clock and continues without it
        frame.data[: len(packet)] = packet
        frame.pts = pts
        self._n += 1
        heapq.heappush(self._heap, (pts, self._n, frame))

    def show(self, clock):
        shown = skipped = 0
        while self._heap and self._heap[0][0] <= clock:
            pts, _, frame = heapq.heappop(self._heap)
            if pts < clock - 200:
                skipped += 1
                continue
            self._sink.write(bytes(frame.data))
            self._pool.recycle(frame)
            shown += 1
        return shown, skipped

    def add_audio(self, packet, pts):
        block = self._pool.obtain()  # clean: near miss, late blocks are recycled too, flush empties the heap
        block.data[: len(packet)] = packet
        self._n += 1
        heapq.heappush(self._audio, (pts, self._n, block))

    def play(self, clock):
        played = 0
        while self._audio and self._audio[0][0] <= clock:
            pts, _, block = heapq.heappop(self._audio)
            late = pts < clock - 50
            if not late:
                self._sink.write(bytes(block.data))
                played += 1
            self._pool.recycle(block)
        return played

    def flush(self):
        for heap in (self._heap, self._audio):
            while heap:
                self._pool.recycle(heapq.heappop(heap)[2])


class Compositor:
    def __init__(self, pool):
        self._pool = pool
        self._layers = []
        self._titles = []

    def add_layer(self, z):
        image = self._pool.obtain()  # clean: flatten recycles the image of each layer
        mask = self._pool.obtain()  # leak: flatten ends the image of a layer, never its mask
        self._layers.append(Layer(image, mask, z))

    def flatten(self):
        out = bytearray()
        for layer in sorted(self._layers, key=lambda item: item.z):
            out += bytes(a & b for a, b in zip(layer.image.data, layer.mask.data))
            self._pool.recycle(layer.image)
        self._layers.clear()
        return bytes(out)

    def add_title(self, z):
        self._titles.append(
            Layer(
                self._pool.obtain(),  # clean: near miss, burn unpacks the record and recycles both
                self._pool.obtain(),  # clean: near miss, burn unpacks the record and recycles both
                z,
            )
        )

    def burn(self):
        total = 0
        while self._titles:
            image, mask, z = self._titles.pop()
            total += z * len(image.data)
            for part in (image, mask):
                self._pool.recycle(part)
        return total
