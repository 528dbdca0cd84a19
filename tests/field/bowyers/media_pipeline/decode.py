"""Packet to picture; pictures come out in presentation order."""
from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass
from typing import BinaryIO, Optional

import torch

from .frames import Surface, SurfacePool

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packet:
    pts: int
    data: bytes
    keyframe: bool
    corrupt: bool = False


def read_packets(path: str, chunk: int = 4096) -> list[Packet]:
    packets: list[Packet] = []
    with open(path, "rb") as src:  # clean: closed by the with
        while True:
            data = src.read(chunk)
            if not data:
                return packets
            packets.append(Packet(len(packets), data, keyframe=data[0] & 1 == 1))


def sniff_codec(path: str) -> str:
    f: BinaryIO = open(path, "rb")  # leak: only the fall-through way closes the file
    magic = f.read(8)
    if magic[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if magic[4:8] == b"ftyp":
        return "mp4"
    f.close()
    return "unknown"


class Decoder:
    def __init__(self, pool: SurfacePool, reorder: int = 4) -> None:
        self.pool = pool
        self.reorder = reorder
        self.skipped = 0
        self._reference: Optional[Surface] = None
        self._pending: list[tuple[int, int, Surface]] = []

    def _reconstruct(self, packet: Packet, into: Surface) -> bool:
        raw = torch.frombuffer(bytearray(packet.data), dtype=torch.uint8)
        into.pixels.view(-1)[: raw.numel()].copy_(raw)
        if not packet.keyframe and self._reference is not None:
            into.pixels.add_(self._reference.pixels)
        into.pts = packet.pts
        return not packet.corrupt

    def decode(self, packet: Packet) -> Optional[Surface]:
        """Next picture in order; the caller holds a reference to it."""
        surface = self.pool.obtain(wait=0.1)  # leak: a corrupt packet returns with the surface held
        if surface is None:
            return None
        if not self._reconstruct(packet, surface):
            self.skipped += 1
            return None
        self._set_reference(packet, surface)
        heapq.heappush(self._pending, (surface.pts, surface.slot, surface))
        if len(self._pending) > self.reorder:
            return heapq.heappop(self._pending)[2]
        return None

    def _set_reference(self, packet: Packet, surface: Surface) -> None:
        if not packet.keyframe:
            return
        if self._reference is not None:
            self.pool.unref(self._reference)
        self._reference = self.pool.add_ref(surface)  # clean: near miss, next keyframe or flush() ends it

    def decode_key(self, packet: Packet) -> Optional[Surface]:
        """Keyframes only, no reordering; the caller holds the picture."""
        surface = self.pool.obtain()  # clean: let go when unreadable, else handed to the caller
        if surface is None:
            return None
        if self._reconstruct(packet, surface):
            return surface
        self.pool.unref(surface)
        return None

    def flush(self) -> list[Surface]:
        if self._reference is not None:
            self.pool.unref(self._reference)
            self._reference = None
        rest = [heapq.heappop(self._pending)[2] for _ in range(len(self._pending))]
        return rest


def thumbnail(decoder: Decoder, packet: Packet, step: int = 8) -> Optional[torch.Tensor]:
    picture = decoder.decode_key(packet)  # leak: the picture is copied and dropped
    if picture is None:
        return None
    small = picture.pixels[:, ::step, ::step].clone()
    return small.float().div_(255.0)


def mean_luma(decoder: Decoder, packet: Packet) -> float:
    picture = decoder.decode_key(packet)  # clean: let go after the reduction
    if picture is None:
        return 0.0
    luma = picture.pixels.float().mean().item()
    decoder.pool.unref(picture)
    return luma


def decode_clip(decoder: Decoder, path: str, want: int) -> torch.Tensor:
    """The first `want` pictures of a file as one tensor."""
    planes: list[torch.Tensor] = []
    for packet in read_packets(path):
        picture = decoder.decode(packet)  # clean: let go each turn, before the break
        if picture is None:
            continue
        planes.append(picture.pixels.clone())
        decoder.pool.unref(picture)
        if len(planes) == want:
            break
    for picture in decoder.flush():  # clean: the rest is let go in the loop
        if len(planes) < want:
            planes.append(picture.pixels.clone())
        decoder.pool.unref(picture)
    return torch.stack(planes) if planes else torch.empty(0)


def count_scenes(decoder: Decoder, path: str, threshold: float) -> int:
    scenes, last = 0, None
    for packet in read_packets(path):
        picture = decoder.decode(packet)  # clean: let go each turn
        if picture is None:
            continue
        level = picture.pixels.float().mean().item()
        decoder.pool.unref(picture)
        if last is None or abs(level - last) > threshold:
            scenes += 1
        last = level
    tail = decoder.flush()  # leak: the remaining pictures are only counted in the log line
    log.debug("%s: %d scenes, %d pictures at the end", path, scenes, len(tail))
    return scenes
