"""Moves tensors between the front process and the model workers through shared memory.

A message on the pipe carries only the segment's name, dtype and shape; the
receiver answers with an ack, upon which the sender may use the segment again.
"""
import enum
import logging
import threading
import time
import zlib
from dataclasses import dataclass
from multiprocessing import shared_memory

import numpy as np

_log = logging.getLogger(__name__)

SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 27)


class ChecksumError(ValueError):
    pass


class PeerGone(ConnectionError):
    pass


class Mode(enum.Enum):
    INLINE = 0
    SEGMENT = 1


@dataclass
class Descriptor:
    seq: int
    mode: Mode
    name: str
    dtype: str
    shape: tuple
    crc: int
    inline: bytes = b""


class SegmentPool:
    """Segments by size class. borrow() makes a new one when none is idle."""

    def __init__(self, max_segments=64):
        self._idle = {size: [] for size in SIZES}
        self._lock = threading.Lock()
        self._made = 0
        self._max = max_segments

    def borrow(self, nbytes):
        size = next((s for s in SIZES if s >= nbytes), None)
        if size is None:
            raise ValueError(f"{nbytes} bytes are more than any segment has")
        with self._lock:
            if self._idle[size]:
                return self._idle[size].pop()  # clean: the caller has it
            if self._made >= self._max:
                return None
            self._made += 1
        return shared_memory.SharedMemory(create=True, size=size)  # clean: returned, comes back through give()

    def give(self, seg):
        with self._lock:
            # the kernel may round up, so look for the class from above
            for size in reversed(SIZES):
                if seg.size >= size:
                    self._idle[size].append(seg)
                    return

    def trim(self, keep=1):
        """Unlinks idle segments down to `keep` in each class."""
        dropped = 0
        with self._lock:
            for idle in self._idle.values():
                while len(idle) > keep:
                    seg = idle.pop()  # clean: closed and unlinked right here
                    seg.close()
                    seg.unlink()
                    self._made -= 1
                    dropped += 1
        return dropped

    def destroy(self):
        self.trim(keep=0)


class Sender:
    def __init__(self, pipe, pool, ack_timeout=5.0):
        self.pipe = pipe
        self.pool = pool
        self.ack_timeout = ack_timeout
        self._seq = 0
        self._inflight = {}
        self._lock = threading.Lock()
        self.peer_alive = True
        self._scratch = None

    def send(self, array):
        array = np.ascontiguousarray(array)
        seq = self._next()
        if array.nbytes < 4096:
            self._push(Descriptor(seq, Mode.INLINE, "", str(array.dtype), array.shape, 0, array.tobytes()))
            return seq
        seg = self._borrow_wait(array.nbytes)  # leak: reap() drops in-flight entries that got no ack without giving the segment back
        if seg is None:
            raise TimeoutError("no segment came free")
        view = np.ndarray(array.shape, array.dtype, buffer=seg.buf)
        view[...] = array
        desc = Descriptor(seq, Mode.SEGMENT, seg.name, str(array.dtype), array.shape, zlib.crc32(array))
        del view
        with self._lock:
            self._inflight[seq] = (seg, time.monotonic())
        self._push(desc)
        return seq

    def send_pair(self, pixels, mask):
        """Both or neither: the model needs the mask along with the pixels."""
        one = self.pool.borrow(pixels.nbytes)  # leak: when there is no second segment the first one is forgotten
        if one is None:
            return None
        two = self.pool.borrow(mask.nbytes)  # clean: near miss, in the in-flight table until on_ack or the PeerGone handler
        if two is None:
            _log.debug("no second segment")
            return None
        seqs = []
        for seg, arr in ((one, pixels), (two, mask)):
            np.ndarray(arr.shape, arr.dtype, buffer=seg.buf)[...] = arr
            seqs.append(self._next())
            self._inflight[seqs[-1]] = (seg, float("inf"))
        try:
            for seq, (seg, arr) in zip(seqs, ((one, pixels), (two, mask))):
                self._push(Descriptor(seq, Mode.SEGMENT, seg.name, str(arr.dtype), arr.shape, 0))
        except PeerGone:
            for seq in seqs:
                self.on_ack(seq)
            return None
        return seqs

    def send_all(self, arrays):
        """Stops at the first array for which the peer is not there any more."""
        for arr in arrays:
            seg = self.pool.borrow(arr.nbytes)  # leak: when the peer is gone the loop ends with this segment outside the table
            if seg is None:
                return False
            np.ndarray(arr.shape, arr.dtype, buffer=seg.buf)[...] = arr
            if not self.peer_alive:
                break
            seq = self._next()
            self._inflight[seq] = (seg, time.monotonic())
            self._push(Descriptor(seq, Mode.SEGMENT, seg.name, str(arr.dtype), arr.shape, 0))
        return self.peer_alive

    def scratch(self, nbytes):
        """A segment of the sender's own that grows when asked for more."""
        if self._scratch is None or self._scratch.size < nbytes:
            self._scratch = self.pool.borrow(nbytes)  # leak: the smaller scratch segment is rebound without a give
        return self._scratch

    def on_ack(self, seq):
        with self._lock:
            entry = self._inflight.pop(seq, None)
        if entry is not None:
            self.pool.give(entry[0])

    def reap(self):
        now = time.monotonic()
        with self._lock:
            late = [s for s, (_, t) in self._inflight.items() if now - t > self.ack_timeout]
            for seq in late:
                del self._inflight[seq]
        if late:
            _log.warning("%d messages without an ack", len(late))
        return late

    def close(self):
        self.peer_alive = False
        for seq in list(self._inflight):
            self.on_ack(seq)
        if self._scratch is not None:
            self.pool.give(self._scratch)
            self._scratch = None
        self.pool.destroy()

    def _next(self):
        with self._lock:
            self._seq += 1
            return self._seq

    def _push(self, desc):
        if not self.peer_alive:
            raise PeerGone("peer is gone")
        self.pipe.send(desc)

    def _borrow_wait(self, nbytes, tries=20):
        for attempt in range(tries):
            seg = self.pool.borrow(nbytes)  # clean: the loop goes on only for None
            if seg is not None:
                return seg
            self.reap()
            time.sleep(0.001 * (attempt + 1))
        return None


class Receiver:
    def __init__(self, pipe, copy=True):
        self.pipe = pipe
        self.copy = copy
        self._maps = {}

    def recv(self):
        desc = self.pipe.recv()
        if desc.mode is Mode.INLINE:
            return np.frombuffer(desc.inline, desc.dtype).reshape(desc.shape)
        if not self.copy:
            return self._map(desc)
        seg = shared_memory.SharedMemory(name=desc.name)  # leak: the checksum error of _verify comes before close()
        out = np.array(np.ndarray(desc.shape, desc.dtype, buffer=seg.buf))
        self._verify(desc, out)
        seg.close()
        self.pipe.send(("ack", desc.seq))
        return out

    @staticmethod
    def _verify(desc, out):
        if desc.crc and zlib.crc32(out) != desc.crc:
            raise ChecksumError(desc.name)

    def _map(self, desc):
        seg = self._maps.get(desc.name)
        if seg is None:
            seg = shared_memory.SharedMemory(name=desc.name)  # clean: stays in the table of maps until close()
            self._maps[desc.name] = seg
        return np.ndarray(desc.shape, desc.dtype, buffer=seg.buf)

    def close(self):
        for seg in self._maps.values():
            seg.close()
        self._maps.clear()


def loopback_check(pool, nbytes=1 << 16):
    """Writes a pattern under one name and reads it under the same name."""
    seg = pool.borrow(nbytes)  # clean: None or given back in the finally
    if seg is None:
        return False
    try:
        seg.buf[:4] = b"\x01\x02\x03\x04"
        peer = shared_memory.SharedMemory(name=seg.name)  # clean: near miss, closed on both outcomes
        same = bytes(peer.buf[:4]) == b"\x01\x02\x03\x04"
        if not same:
            peer.close()
            return False
        peer.close()
        return True
    finally:
        pool.give(seg)
