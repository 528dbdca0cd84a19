"""Frame ingestion for the camera fleet: decode into slabs, batch and publish."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Deque, Dict, Iterable, List, Optional

from slabkit import SlabExhausted, SlabPool

from fleet.codec import decode_into, probe
from fleet.wire import Publisher

log = logging.getLogger(__name__)


@dataclass
class Frame:
    camera: str
    pts: int
    slab: Any


class FrameDecoder:
    def __init__(self, pool: SlabPool, max_bytes: int) -> None:
        self._pool = pool
        self._max_bytes = max_bytes
        self.rejected = 0

    def decode(self, packet: bytes) -> Optional[Frame]:
        """Decode one packet; the caller owns the slab of the returned frame."""
        header = probe(packet)
        if header.size > self._max_bytes:
            self.rejected += 1
            return None
        slab = self._pool.carve_slab(header.size)  # clean: handed to the caller inside the frame, restored when nothing was written
        written = decode_into(slab.view, packet)
        if written == 0:
            self._pool.restore_slab(slab)
            return None
        return Frame(header.camera, header.pts, slab)

    def thumbnail(self, packet: bytes, edge: int) -> Optional[bytes]:
        header = probe(packet)
        slab = self._pool.carve_slab(header.size)  # leak: the early return for B-frames keeps the slab
        if not header.keyframe:
            self.rejected += 1
            return None
        decode_into(slab.view, packet)
        picture = slab.downscale(edge)
        self._pool.restore_slab(slab)
        return picture

    def checksum(self, packet: bytes) -> int:
        with self._pool.slab_scope(len(packet)) as scratch:  # clean: lease gives back by itself
            decode_into(scratch.view, packet)
            return scratch.crc32()


class FrameBatcher:
    """Keeps the newest frame of each camera until the next tick."""

    def __init__(self, pool: SlabPool, decoder: FrameDecoder, out: Publisher) -> None:
        self._pool = pool
        self._decoder = decoder
        self._out = out
        self._latest: Dict[str, Frame] = {}
        self._previews: Dict[str, Frame] = {}
        self._backlog: Deque[Frame] = deque()

    def push(self, packet: bytes) -> None:
        frame = self._decoder.decode(packet)  # clean: near miss, the frame it replaces is restored first and tick or close restores it
        if frame is None:
            return
        stale = self._latest.pop(frame.camera, None)
        if stale is not None:
            self._pool.restore_slab(stale.slab)
        self._latest[frame.camera] = frame

    def push_preview(self, packet: bytes) -> None:
        frame = self._decoder.decode(packet)  # leak: overwrites the previous preview of the same camera
        if frame is None:
            return
        self._previews[frame.camera] = frame

    def push_archive(self, packet: bytes) -> bool:
        frame = self._decoder.decode(packet)  # clean: queued in the backlog, which drain and close empty
        if frame is None:
            return False
        self._backlog.append(frame)
        return True

    def tick(self) -> int:
        sent = 0
        for camera in list(self._latest):
            frame = self._latest.pop(camera)
            self._out.send(camera, frame.slab.tobytes())
            self._pool.restore_slab(frame.slab)
            sent += 1
        return sent

    def drain(self, limit: int) -> None:
        while self._backlog and limit > 0:
            frame = self._backlog.popleft()
            self._out.archive(frame.camera, frame.pts, frame.slab.tobytes())
            self._pool.restore_slab(frame.slab)
            limit -= 1

    def close(self) -> None:
        self.tick()
        for frame in self._previews.values():
            self._pool.restore_slab(frame.slab)
        self._previews.clear()
        self.drain(len(self._backlog))


def replay(pool: SlabPool, decoder: FrameDecoder, packets: Iterable[bytes], since: int) -> List[int]:
    """Feed a recording through the decoder and return the time stamps that were kept."""
    kept: List[int] = []
    for packet in packets:
        frame = decoder.decode(packet)  # leak: frames older than since are skipped with their slab
        if frame is None:
            continue
        if frame.pts < since:
            continue
        kept.append(frame.pts)
        pool.restore_slab(frame.slab)
    return kept


def stitch(pool: SlabPool, left: bytes, right: bytes, out: Publisher) -> bool:
    first = pool.carve_slab(len(left))  # clean: near miss, restored in the handler of the second acquire and in the finally
    try:
        second = pool.carve_slab(len(right))  # clean: restored in the finally
    except SlabExhausted:
        pool.restore_slab(first)
        return False
    try:
        decode_into(first.view, left)
        decode_into(second.view, right)
        out.send("stitched", first.tobytes() + second.tobytes())
    finally:
        pool.restore_slab(second)
        pool.restore_slab(first)
    return True


def mosaic(pool: SlabPool, packets: List[bytes], out: Publisher) -> bool:
    canvas = pool.carve_slab(sum(map(len, packets)))  # clean: adopted by the publisher
    tile = pool.carve_slab(max(map(len, packets)))  # leak: only the canvas is given away when the result is empty
    painted = 0
    for packet in packets:
        painted += decode_into(tile.view, packet)
        canvas.blit(tile)
    if painted == 0:
        pool.restore_slab(canvas)
        return False
    out.adopt_slab(canvas)
    pool.restore_slab(tile)
    return True
