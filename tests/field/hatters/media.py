"""Video frames, audio blocks, surfaces and encoder sessions of the captioning pipeline."""
from __future__ import annotations

import ctypes
import itertools
import secrets
import threading
from collections import deque


class MediaError(Exception):
    pass


class VideoFrame:
    __slots__ = ("_pool", "_refs", "plane", "pts")

    def __init__(self, pool, nbytes):
        self._pool = pool
        self._refs = 0
        self.plane = bytearray(nbytes)
        self.pts = None

    def ref(self):
        self._refs += 1
        return self

    def unref(self):
        if self._refs <= 0:
            raise MediaError("unref of a dead frame")
        self._refs -= 1
        if self._refs == 0:
            self.pts = None
            self._pool._dead.append(self)


class FramePool:
    def __init__(self, nbytes, soft_limit=32):
        self._nbytes = nbytes
        self._dead = []
        self._soft = soft_limit
        self.born = 0

    def obtain(self):
        if self._dead:
            frame = self._dead.pop()
        else:
            self.born += 1
            if self.born > self._soft:
                raise MediaError("too many frames in flight")
            frame = VideoFrame(self, self._nbytes)
        return frame.ref()


def thumbnail(pool, decoder, scaler):
    frame = pool.obtain()  # leak: at the end of the stream it returns None without unref
    if not decoder.read_into(frame.plane):
        return None
    small = scaler.scale(bytes(frame.plane))
    frame.unref()
    return small


def tee(frame, sinks):
    for sink in sinks:
        sink.push(frame.ref())  # clean: near miss, each sink unrefs what it was pushed


class PreviewSink:
    def __init__(self):
        self.latest = None

    def push(self, frame):
        if self.latest is not None:
            self.latest.unref()
        self.latest = frame

    def close(self):
        if self.latest is not None:
            self.latest.unref()
            self.latest = None


class MotionGate:
    def __init__(self, sink, threshold):
        self.sink = sink
        self.threshold = threshold

    def offer(self, frame, motion):
        kept = frame.ref()  # leak: under the threshold the extra reference is dropped
        if motion < self.threshold:
            return False
        self.sink.push(kept)
        return True


def pump(pool, decoder, sink):
    n = 0
    while True:
        frame = pool.obtain()  # clean: unref at the end of the stream, else pushed to the sink
        if not decoder.read_into(frame.plane):
            frame.unref()
            return n
        frame.pts = n
        sink.push(frame)
        n += 1


class AudioBlocks:
    """Fixed blocks of samples; a block is aloft until it lands."""

    def __init__(self, nblocks, samples):
        self.blocks = [[0.0] * samples for _ in range(nblocks)]
        self._ground = deque(range(nblocks))
        self._aloft = [False] * nblocks
        self.underruns = 0

    def launch(self):
        if not self._ground:
            self.underruns += 1
            return -1
        i = self._ground.popleft()
        self._aloft[i] = True
        return i

    def land(self, i):
        if not self._aloft[i]:
            raise MediaError(f"block {i} is on the ground")
        self._aloft[i] = False
        self._ground.append(i)


def mix(blocks, a, b):
    i = blocks.launch()  # leak: on an underrun of the second block the first stays aloft
    if i < 0:
        return None
    j = blocks.launch()  # clean: landed at the end
    if j < 0:
        return None
    a.fill(blocks.blocks[i])
    b.fill(blocks.blocks[j])
    out = [x + y for x, y in zip(blocks.blocks[i], blocks.blocks[j])]
    blocks.land(j)
    blocks.land(i)
    return out


class Looper:
    def __init__(self, blocks):
        self.blocks = blocks
        self.tape = []

    def record(self, source):
        i = self.blocks.launch()  # leak: keep_last cuts older blocks off the tape without landing them
        if i >= 0:
            source.fill(self.blocks.blocks[i])
            self.tape.append(i)

    def keep_last(self, n):
        self.tape = self.tape[-n:]

    def erase(self):
        for i in self.tape:
            self.blocks.land(i)
        self.tape.clear()


class Surface(ctypes.Structure):
    _fields_ = [("width", ctypes.c_int), ("height", ctypes.c_int), ("bits", ctypes.c_char * 256)]


class SurfaceMapper:
    """Maps surfaces into the host's address space; lends plain addresses."""

    def __init__(self):
        self._mapped = {}
        self.n_maps = 0

    def map(self, surface):
        addr = ctypes.addressof(surface)
        count, _ = self._mapped.get(addr, (0, None))
        self._mapped[addr] = (count + 1, surface)
        self.n_maps += 1
        return addr

    def unmap(self, addr):
        count, surface = self._mapped[addr]
        if count == 1:
            del self._mapped[addr]
        else:
            self._mapped[addr] = (count - 1, surface)


def peek_pixel(mapper, surface, x):
    addr = mapper.map(surface)  # leak: outside the width it returns while mapped
    if x >= surface.width:
        return None
    value = ctypes.string_at(addr + Surface.bits.offset + x, 1)
    mapper.unmap(addr)
    return value


def blit(mapper, src, dst, n):
    a = mapper.map(src)  # clean: unmapped in finally
    b = mapper.map(dst)  # clean: unmapped in finally
    try:
        ctypes.memmove(b + Surface.bits.offset, a + Surface.bits.offset, n)
    finally:
        mapper.unmap(b)
        mapper.unmap(a)


class EncoderSessions:
    """The card has few encoder sessions; a token stands for one."""

    LIMIT = 3

    def __init__(self):
        self._tokens = {}
        self._lock = threading.Lock()

    def open_session(self, preset):
        with self._lock:
            if len(self._tokens) >= self.LIMIT:
                return ""
            token = secrets.token_hex(4)
            self._tokens[token] = preset
            return token

    def close_session(self, token):
        with self._lock:
            self._tokens.pop(token)

    def encode(self, token, frame):
        return self._tokens[token], frame


def encode_clip(sessions, frames, preset):
    token = sessions.open_session(preset)  # clean: closed after the last frame
    if not token:
        return None
    out = [sessions.encode(token, f) for f in frames]
    sessions.close_session(token)
    return out


def encode_adaptive(sessions, frames, presets):
    token = sessions.open_session(presets[0])  # leak: the change of preset rebinds the token
    if not token:
        return []
    out = []
    for n, f in enumerate(frames):
        if n and n % 100 == 0:
            token = sessions.open_session(presets[n // 100 % len(presets)]) or token  # leak: rebound by the next change of preset
        out.append(sessions.encode(token, f))
    sessions.close_session(token)
    return out


class Muxer:
    """Writing is paused while anybody freezes it."""

    def __init__(self, sink):
        self._sink = sink
        self._frozen = 0
        self._backlog = deque()

    def freeze(self):
        self._frozen += 1

    def thaw(self):
        assert self._frozen
        self._frozen -= 1
        if not self._frozen:
            while self._backlog:
                self._sink(self._backlog.popleft())

    def write(self, packet):
        if self._frozen:
            self._backlog.append(packet)
        else:
            self._sink(packet)


def splice(muxer, packets, ad):
    muxer.freeze()  # leak: without an ad it returns frozen
    if not ad:
        return len(packets)
    for p in packets + ad:
        muxer.write(p)
    muxer.thaw()
    return len(packets) + len(ad)


class Chapter:
    def __init__(self, muxer):
        self.muxer = muxer

    def __enter__(self):
        self.muxer.freeze()  # clean: thawed by the exit
        return self

    def __exit__(self, *exc):
        self.muxer.thaw()
        return False


class TimestampSource:
    """Rising numbers for packets."""

    def __init__(self, step=512):
        self._n = itertools.count(0, step)
        self.last = -1

    def acquire(self):
        self.last = next(self._n)
        return self.last

    def release(self):
        self._n = itertools.count(0)


def stamp(source, packets):
    for p in packets:
        ts = source.acquire()  # clean: a number is made, nothing is lent
        if p.keyframe is None:
            continue
        p.pts = ts
