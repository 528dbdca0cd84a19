"""Fixed-size trajectory segments carved out of one block of host memory.

Actors write episodes segment by segment, the learner feed drains finished
episodes.  The arena only hands out integer segment numbers; None means full.
"""
from __future__ import annotations

import struct
import threading
import zlib
from collections import deque
from contextlib import contextmanager
from typing import Deque, Dict, Iterator, List, Optional, Tuple

HEADER = struct.Struct("<IIQ")  # length, crc, episode id


class ArenaFull(RuntimeError):
    pass


class SegmentArena:
    def __init__(self, segment_bytes: int, count: int) -> None:
        self.segment_bytes = segment_bytes
        self.count = count
        self._mem = memoryview(bytearray(segment_bytes * count))
        self._bits = 0
        self._lock = threading.Lock()

    def carve(self) -> Optional[int]:
        with self._lock:
            for i in range(self.count):
                mask = 1 << i
                if not self._bits & mask:
                    self._bits |= mask
                    return i
        return None

    def restore(self, idx: int) -> None:
        with self._lock:
            self._bits &= ~(1 << idx)

    def view(self, idx: int) -> memoryview:
        off = idx * self.segment_bytes
        return self._mem[off:off + self.segment_bytes]

    def carve_many(self, n: int) -> Optional[List[int]]:
        got: List[int] = []
        for _ in range(n):
            idx = self.carve()  # clean: the whole batch is restored when the arena runs dry, else returned
            if idx is None:
                for g in got:
                    self.restore(g)
                return None
            got.append(idx)
        return got

    def carve_pair(self) -> Optional[Tuple[int, int]]:
        """Two adjacent segments, used for double-width observations."""
        a = self.carve()  # clean: restored on both failure returns, else returned
        if a is None:
            return None
        b = self.carve()  # leak: only a is restored when the two are not adjacent
        if b is None:
            self.restore(a)
            return None
        if b != a + 1:
            self.restore(a)
            return None
        return a, b

    def free_count(self) -> int:
        with self._lock:
            return self.count - bin(self._bits).count("1")


@contextmanager
def scratch_segment(arena: SegmentArena) -> Iterator[memoryview]:
    idx = arena.carve()  # clean: restored in finally
    if idx is None:
        raise ArenaFull("no scratch segment")
    try:
        yield arena.view(idx)
    finally:
        arena.restore(idx)


class TrajectoryWriter:
    def __init__(self, arena: SegmentArena) -> None:
        self.arena = arena
        self.open: Dict[int, List[int]] = {}
        self.ready: Deque[Tuple[int, List[int]]] = deque()

    def begin(self, episode: int) -> bool:
        if episode in self.open:
            return False
        idx = self.arena.carve()  # clean: near miss, filed in self.open, emptied by abort() or via ready
        if idx is None:
            return False
        self.open[episode] = [idx]
        return True

    def extend(self, episode: int, payload: bytes) -> bool:
        idx = self.arena.carve()  # leak: dropped when the episode was aborted meanwhile
        if idx is None:
            return False
        segments = self.open.get(episode)
        if segments is None:
            return False
        self._write(idx, episode, payload)
        segments.append(idx)
        return True

    def extend_wide(self, episode: int, left: bytes, right: bytes) -> bool:
        segments = self.open.get(episode)
        if segments is None:
            return False
        pair = self.arena.carve_pair()  # clean: both halves join the episode's segment list
        if pair is None:
            return False
        for idx, part in zip(pair, (left, right)):
            self._write(idx, episode, part)
        segments.extend(pair)
        return True

    def rewrite_tail(self, episode: int, payload: bytes) -> bool:
        """Replace the last segment, e.g. after a reward correction."""
        segments = self.open.get(episode)
        if not segments:
            return False
        fresh = self.arena.carve()  # clean: near miss, replaces the tail, which is restored right after
        if fresh is None:
            return False
        self._write(fresh, episode, payload)
        old, segments[-1] = segments[-1], fresh
        self.arena.restore(old)
        return True

    def finish(self, episode: int) -> None:
        segments = self.open.pop(episode, None)
        if segments is not None:
            self.ready.append((episode, segments))

    def abort(self, episode: int) -> None:
        for idx in self.open.pop(episode, ()):
            self.arena.restore(idx)

    def _write(self, idx: int, episode: int, payload: bytes) -> None:
        view = self.arena.view(idx)
        body = payload[: self.arena.segment_bytes - HEADER.size]
        HEADER.pack_into(view, 0, len(body), zlib.crc32(body), episode)
        view[HEADER.size:HEADER.size + len(body)] = body


class LearnerFeed:
    def __init__(self, writer: TrajectoryWriter) -> None:
        self.writer = writer
        self.arena = writer.arena

    def collect(self, limit: int) -> List[bytes]:
        out: List[bytes] = []
        while self.writer.ready and len(out) < limit:
            _, segments = self.writer.ready.popleft()
            out.append(b"".join(bytes(self.arena.view(i)) for i in segments))
            for idx in segments:
                self.arena.restore(idx)
        return out


def repack(arena: SegmentArena, sources: List[int]) -> List[int]:
    """Pack half-empty segments into fresh ones; the caller keeps `sources`."""
    out: List[int] = []
    cur = arena.carve()  # clean: joins out before every return that follows
    if cur is None:
        return out
    used = 0
    for src in sources:
        n, _, _ = HEADER.unpack_from(arena.view(src))
        if used + n > arena.segment_bytes:
            out.append(cur)
            nxt = arena.carve()  # clean: near miss, becomes cur, which joins out
            if nxt is None:
                for idx in out:
                    arena.restore(idx)
                return []
            cur = nxt
            used = 0
        arena.view(cur)[used:used + n] = arena.view(src)[HEADER.size:HEADER.size + n]
        used += n
    out.append(cur)
    return out


def mirror_episode(arena: SegmentArena, sources: List[int]) -> Optional[List[int]]:
    copies: List[int] = []
    for src in sources:
        dst = arena.carve()  # leak: earlier copies are dropped when a later one finds the arena full
        if dst is None:
            return None
        arena.view(dst)[:] = arena.view(src)
        copies.append(dst)
    return copies


def checksum_all(arena: SegmentArena, sources: List[int]) -> Dict[int, int]:
    sums: Dict[int, int] = {}
    tmp = arena.carve()  # clean: near miss, the continue stays inside the loop and the restore is after it
    if tmp is None:
        return sums
    for src in sources:
        n, crc, episode = HEADER.unpack_from(arena.view(src))
        if n == 0:
            continue
        arena.view(tmp)[:] = arena.view(src)
        sums[episode] = crc
    arena.restore(tmp)
    return sums


def replay_tail(arena: SegmentArena, sources: List[int], want: int) -> Optional[bytes]:
    """Look for the newest segment of episode `want` through a private copy."""
    for src in reversed(sources):
        tmp = arena.carve()  # leak: continue on a foreign episode skips the restore
        if tmp is None:
            return None
        arena.view(tmp)[:] = arena.view(src)
        n, _, episode = HEADER.unpack_from(arena.view(tmp))
        if episode != want:
            continue
        data = bytes(arena.view(tmp)[HEADER.size:HEADER.size + n])
        arena.restore(tmp)
        return data
    return None


def widen(arena: SegmentArena, narrow: int) -> Optional[Tuple[int, int]]:
    """Move a narrow segment to a pair; consumes `narrow` on success."""
    pair = arena.carve_pair()  # leak: an empty narrow segment returns None and loses the pair
    if pair is None:
        return None
    n, _, _ = HEADER.unpack_from(arena.view(narrow))
    if n == 0:
        return None
    arena.view(pair[0])[:] = arena.view(narrow)
    arena.restore(narrow)
    return pair
