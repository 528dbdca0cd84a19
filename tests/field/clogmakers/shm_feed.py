"""Feeds batches from producer processes to the trainer through shared memory.

One segment is cut into frames.  Frame numbers travel through queues, the arrays stay where they are.
"""
import atexit
import logging
import multiprocessing as mp
import queue
import struct
import time
from multiprocessing import shared_memory

import numpy as np

log = logging.getLogger("feed")

HEADER = struct.Struct("<IIQ")
MAGIC = 0x46454544

_segments = {}


class FeedBroken(RuntimeError):
    pass


class FrameTooSmall(ValueError):
    pass


def create_segment(name, nbytes):
    if name in _segments:
        raise FeedBroken(f"segment {name} exists")
    seg = shared_memory.SharedMemory(name, create=True, size=nbytes)  # clean: kept in the module table until destroy_segment
    _segments[name] = seg
    return seg


def destroy_segment(name):
    seg = _segments.pop(name, None)
    if seg is not None:
        seg.close()
        seg.unlink()


@atexit.register
def _destroy_all():
    for name in list(_segments):
        destroy_segment(name)


def attach(name, expect):
    """Maps the segment of another process."""
    seg = shared_memory.SharedMemory(name)  # leak: a segment that is too small is still mapped when FeedBroken is raised
    if seg.size < expect:
        raise FeedBroken(f"{name} has {seg.size} bytes, not {expect}")
    return seg


def peek_size(name):
    seg = shared_memory.SharedMemory(name)  # clean: closed in finally
    try:
        return seg.size
    finally:
        seg.close()


class Frames:
    """The free list is a queue between the processes."""

    def __init__(self, seg, frame_bytes, count, ctx=mp):
        self.seg = seg
        self.frame_bytes = frame_bytes
        self.free = ctx.Queue()
        self.retired = ctx.Value("i", 0)
        for i in range(count):
            self.free.put(i)

    def claim(self, timeout=None):
        try:
            frame = self.free.get(timeout=timeout)  # clean: handed to the caller, nothing is claimed when it is Empty
        except queue.Empty:
            return None
        return frame

    def claim_many(self, n, patience=1.0):
        """n frames or none."""
        got = []
        deadline = time.monotonic() + patience
        while len(got) < n:
            frame = self.claim(max(0.0, deadline - time.monotonic()))  # leak: a late frame puts back all of got but the last one
            if frame is None:
                for f in got[:-1]:
                    self.unclaim(f)
                return []
            got.append(frame)
        return got

    def unclaim(self, frame):
        self.free.put(frame)

    def view(self, frame, offset=0):
        start = frame * self.frame_bytes + offset
        return self.seg.buf[start : (frame + 1) * self.frame_bytes]


def pack_into(frames, frame, arrays):
    """Writes header and arrays, returns the number of bytes."""
    pos = HEADER.size
    for a in arrays:
        end = pos + 8 + a.nbytes
        if end > frames.frame_bytes:
            raise FrameTooSmall(f"{end} bytes in a frame of {frames.frame_bytes}")
        buf = frames.view(frame, pos)
        buf[:8] = struct.pack("<Q", a.nbytes)
        buf[8 : 8 + a.nbytes] = a.tobytes()
        pos = end
    frames.view(frame)[: HEADER.size] = HEADER.pack(MAGIC, len(arrays), pos)
    return pos


def unpack_from(frames, frame):
    magic, count, _ = HEADER.unpack(frames.view(frame)[: HEADER.size])
    if magic != MAGIC:
        raise FeedBroken(f"frame {frame} has no header")
    pos, out = HEADER.size, []
    for _ in range(count):
        (n,) = struct.unpack("<Q", frames.view(frame, pos)[:8])
        out.append(np.frombuffer(frames.view(frame, pos + 8)[:n], dtype=np.uint8).copy())
        pos += 8 + n
    return out


# producer side

def produce(source, frames, full, stop):
    sent = skipped = 0
    for arrays in source:
        if stop.is_set():
            break
        frame = frames.claim(timeout=30)  # leak: a batch that is too large for the frame is skipped with the frame
        if frame is None:
            raise FeedBroken("the trainer takes nothing any more")
        try:
            pack_into(frames, frame, arrays)
        except FrameTooSmall as exc:
            skipped += 1
            log.warning("%s", exc)
            continue
        full.put(frame)
        sent += 1
    full.put(None)
    return sent, skipped


def produce_filtered(source, frames, full, keep):
    """Claims ahead and reuses the frame while the filter refuses."""
    frame = None
    try:
        for arrays in source:
            if frame is None:
                frame = frames.claim()  # clean: near miss, kept over the turns, sent or unclaimed in finally
            try:
                pack_into(frames, frame, arrays)
            except FrameTooSmall:
                continue
            if not keep(arrays):
                continue
            full.put(frame)
            frame = None
    finally:
        if frame is not None:
            frames.unclaim(frame)
        full.put(None)


def produce_pairs(source, frames, full, log_every=1000):
    for i, (chosen, rejected) in enumerate(source):
        pair = frames.claim_many(2)  # clean: sent as a pair or unclaimed one by one
        if not pair:
            log.warning("no frames for pair %d", i)
            continue
        try:
            pack_into(frames, pair[0], chosen)
            pack_into(frames, pair[1], rejected)
        except FrameTooSmall:
            for f in pair:
                frames.unclaim(f)
            continue
        full.put(tuple(pair))
        if i % log_every == 0:
            log.info("%d pairs", i)


# trainer side

class Lease:
    """Arrays of a frame that is given back when the trainer is through with them."""

    def __init__(self, frames, frame):
        self.frames = frames
        self.frame = frame
        self.closed = False

    def arrays(self):
        return unpack_from(self.frames, self.frame)

    def close(self):
        if not self.closed:
            self.closed = True
            self.frames.unclaim(self.frame)


class LocalFeed:
    """The same without processes, the producer runs in the trainer."""

    def __init__(self, source, frames):
        self.source = source
        self.frames = frames
        self.current = None
        self.spare = None

    def advance(self):
        frame = self.frames.claim()  # leak: the lease before is replaced, only close() closes one
        pack_into(self.frames, frame, next(self.source))
        self.current = Lease(self.frames, frame)
        return self.current.arrays()

    def reserve_spare(self):
        if self.spare is None:
            self.spare = self.frames.claim(timeout=1)  # clean: near miss, only without a spare, close() unclaims it
        return self.spare is not None

    def close(self):
        if self.current is not None:
            self.current.close()
        if self.spare is not None:
            self.frames.unclaim(self.spare)
        self.current = self.spare = None


def batches(name, frames, full, expect):
    seg = attach(name, expect)  # clean: closed in finally when the generator ends
    try:
        while True:
            item = full.get()
            if item is None:
                return
            leases = [Lease(frames, f) for f in (item if isinstance(item, tuple) else (item,))]
            try:
                for lease in leases:
                    yield lease.arrays()
            finally:
                for lease in leases:
                    lease.close()
    finally:
        seg.close()


def sample_sizes(frames, source, n):
    sizes = []
    for _, arrays in zip(range(n), source):
        frame = frames.claim(timeout=5)  # leak: the size is known when it breaks, the frame is not put back on that way
        if frame is None:
            break
        sizes.append(pack_into(frames, frame, arrays))
        if sizes[-1] > frames.frame_bytes // 2:
            log.info("large batch, enough seen")
            break
        frames.unclaim(frame)
    return sizes


def smoke_test(nbytes=1 << 20):
    seg = create_segment("feed-smoke", nbytes)  # clean: destroyed in finally by its name
    try:
        frames = Frames(seg, nbytes // 4, 4)
        frame = frames.claim(timeout=1)  # clean: unclaimed in the inner finally
        try:
            pack_into(frames, frame, [np.arange(8)])
            assert len(unpack_from(frames, frame)) == 1
        finally:
            frames.unclaim(frame)
    finally:
        destroy_segment("feed-smoke")
