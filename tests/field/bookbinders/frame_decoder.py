"""Decoding of clips into frames. Decoders are few, frame buffers are pinned and few as well."""
import queue
import threading
import time

import numpy as np

KNOWN = {"h264", "hevc", "av1", "vp9"}


class UnknownCodec(ValueError):
    pass


class BankFull(RuntimeError):
    pass


class Starved(BankFull):
    pass


class Frame:
    __slots__ = ("buf", "pts", "score")

    def __init__(self, buf):
        self.buf, self.pts, self.score = buf, None, 0.0


class FramePool:
    def __init__(self, n, height, width):
        self._q = queue.Queue()
        self.out = 0
        for _ in range(n):
            self._q.put(np.zeros((height, width, 3), dtype=np.uint8))

    def obtain(self, timeout=None):
        try:
            buf = self._q.get(timeout=timeout)  # clean: goes to the caller inside the Frame
        except queue.Empty:
            return None
        self.out += 1
        return Frame(buf)

    def recycle(self, frame):
        self.out -= 1
        self._q.put(frame.buf)


class Decoder:
    def __init__(self, codec, lib):
        self.codec, self.lib = codec, lib

    def decode(self, packet, into):
        return self.lib.decode(self.codec, packet.data, into)


class DecoderBank:
    def __init__(self, lib, limit):
        self._lib, self._sem = lib, threading.BoundedSemaphore(limit)

    def open(self, codec):
        if not self._sem.acquire(timeout=10):  # leak: for an unknown codec the error is raised with the permit taken
            raise BankFull()
        if codec not in KNOWN:
            raise UnknownCodec(codec)
        return Decoder(codec, self._lib)

    def shut(self, dec):
        dec.lib = None
        self._sem.release()


class DecoderCache:
    """One decoder per codec for the small jobs, shut with its last user."""

    def __init__(self, bank):
        self._bank = bank
        self._lock = threading.Lock()
        self._by_codec = {}

    def use(self, codec):
        with self._lock:
            entry = self._by_codec.get(codec)
            if entry is None:
                entry = self._by_codec[codec] = [self._bank.open(codec), 0]  # clean: near miss, done() shuts it when the count comes to nought
            entry[1] += 1
            return entry[0]

    def done(self, codec):
        with self._lock:
            entry = self._by_codec[codec]
            entry[1] -= 1
            if entry[1] == 0:
                del self._by_codec[codec]
                self._bank.shut(entry[0])


def frames(bank, pool, clip):
    """Yields frames; whoever takes one recycles it."""
    dec = bank.open(clip.codec)  # clean: shut when the generator ends or is closed
    try:
        for packet in clip.packets():
            frame = pool.obtain(timeout=5)  # clean: near miss, recycled when nothing came out of the packet, and else yielded
            if frame is None:
                raise Starved(clip.name)
            if not dec.decode(packet, frame.buf):
                pool.recycle(frame)
                continue
            frame.pts = packet.pts
            yield frame
    finally:
        bank.shut(dec)


def every_nth(source, n):
    for i, frame in enumerate(source):
        if i % n == 0:
            yield frame


def storyboard(bank, pool, clip, n=48):
    tiles = []
    for frame in every_nth(frames(bank, pool, clip), n):  # leak: every_nth() lets the frames between go without recycling them
        tiles.append(frame.buf[::8, ::8].copy())
        pool.recycle(frame)
    return np.concatenate(tiles, axis=1) if tiles else None


def sharpness(frame):
    return float(np.abs(np.diff(frame.buf.mean(axis=2), axis=0)).mean())


def find_cover(bank, pool, clip):
    best = None
    for frame in frames(bank, pool, clip):  # leak: a sharper frame is bound over the best so far
        frame.score = sharpness(frame)
        if best is None or frame.score > best.score:
            best = frame
        else:
            pool.recycle(frame)
    image = best and best.buf.copy()
    if best is not None:
        pool.recycle(best)
    return image


def motion(bank, pool, clip):
    prev = None
    try:
        for frame in frames(bank, pool, clip):  # clean: near miss, always one behind, and the finally recycles the last
            old, prev = prev, frame
            if old is None:
                continue
            moved = float(np.abs(frame.buf.astype(np.int16) - old.buf).mean())
            pool.recycle(old)
            yield frame.pts, moved
    finally:
        if prev is not None:
            pool.recycle(prev)


class Prefetcher:
    def __init__(self, bank, pool, clip, depth=4):
        self._args = (bank, pool, clip)
        self._out = queue.Queue(depth)
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _offer(self, frame):
        while not self._halt.is_set():
            if not self._out.full():
                self._out.put(frame)
                return True
            time.sleep(0.01)
        return False

    def _run(self):
        bank, pool, clip = self._args
        for frame in frames(bank, pool, clip):  # leak: close() leaves what is queued, and the one not taken, where it is
            if not self._offer(frame):
                return
        self._offer(None)

    def get(self):
        return self._out.get()  # clean: goes to the caller

    def close(self):
        self._halt.set()
        self._thread.join()


def feed(bank, pool, clip, step, max_steps):
    pre = Prefetcher(bank, pool, clip)
    try:
        for _ in range(max_steps):
            frame = pre.get()  # clean: recycled in the finally
            if frame is None:
                break
            try:
                step(frame.buf)
            finally:
                pool.recycle(frame)
    finally:
        pre.close()


class ClipBatch:
    def __init__(self, pool, size):
        self.pool, self.size, self.frames = pool, size, []

    def add(self, frame):
        self.frames.append(frame)
        return len(self.frames) == self.size

    def tensor(self):
        return np.stack([f.buf for f in self.frames])

    def done(self):
        for f in self.frames:
            self.pool.recycle(f)
        self.frames = []


def batches(bank, pool, clip, size, drop_last=True):
    batch = ClipBatch(pool, size)
    for frame in frames(bank, pool, clip):  # leak: with drop_last the frames of the unfilled batch are never done()
        if batch.add(frame):
            yield batch
            batch = ClipBatch(pool, size)
    if batch.frames and not drop_last:
        yield batch


def embed_clip(bank, pool, clip, model, size=16):
    parts = []
    for batch in batches(bank, pool, clip, size):  # clean: done() in the finally
        try:
            parts.append(model(batch.tensor()))
        finally:
            batch.done()
    return np.concatenate(parts) if parts else np.empty((0, model.dim))


def poster(cache, pool, clip):
    dec = cache.use(clip.codec)  # clean: done() in the finally
    try:
        frame = pool.obtain(timeout=1)  # clean: recycled in the inner finally
        if frame is None:
            return None
        try:
            for packet in clip.packets():
                if dec.decode(packet, frame.buf):
                    return frame.buf.copy()
            return None
        finally:
            pool.recycle(frame)
    finally:
        cache.done(clip.codec)
