"""Pack and unpack hooks for saved tensors."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple, Union

from .pinned import PinnedBuffer, PinnedPool
from .streams import StreamPool, copy_stream


@dataclass
class Offloaded:
    """What the graph keeps in place of the activation."""
    buf: PinnedBuffer
    nbytes: int
    layer: int


Packed = Union[bytes, Offloaded]


class OffloadHooks:
    def __init__(self, host: PinnedPool, streams: StreamPool, min_bytes: int = 1024):
        self.host = host
        self.streams = streams
        self.min_bytes = min_bytes
        self.by_layer: Dict[int, List[Offloaded]] = {}
        self.prefetched: Dict[int, Tuple[PinnedBuffer, int]] = {}
        self.spilled = 0

    def pack(self, layer: int, act: bytes) -> Packed:
        if len(act) < self.min_bytes:
            return act
        buf = self.host.pin(len(act))  # clean: kept by the Offloaded record, unpack or discard unpins
        if buf is None:
            self.spilled += 1
            return act
        with copy_stream(self.streams) as s:  # clean: with
            s.copy(buf, act)
        rec = Offloaded(buf, len(act), layer)
        self.by_layer.setdefault(layer, []).append(rec)
        return rec

    def unpack(self, packed: Packed) -> bytes:
        if isinstance(packed, bytes):
            return packed
        self.by_layer[packed.layer].remove(packed)
        data = packed.buf.read()
        self.host.unpin(packed.buf)
        return data

    def discard(self, layer: int) -> None:
        for rec in self.by_layer.pop(layer, []):
            self.host.unpin(rec.buf)

    def prefetch(self, layer: int, act: bytes) -> bool:
        buf = self.host.pin(len(act))  # leak: take_prefetched drops it when the sequence length changed
        if buf is None:
            return False
        buf.write(act)
        if layer in self.prefetched:
            stale, _ = self.prefetched[layer]
            self.host.unpin(stale)
        self.prefetched[layer] = (buf, len(act))
        return True

    def take_prefetched(self, layer: int, nbytes: int) -> Optional[bytes]:
        entry = self.prefetched.pop(layer, None)
        if entry is None:
            return None
        buf, have = entry
        if have != nbytes:
            return None
        data = buf.read()
        self.host.unpin(buf)
        return data
