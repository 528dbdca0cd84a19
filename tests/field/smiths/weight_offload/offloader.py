from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from .quant import pack_groups, pack_int4
from .staging import CopyStreams, PinnedBuffer, PinnedStaging


class TransferError(RuntimeError):
    pass


class LayerOffloader:
    def __init__(self, staging: PinnedStaging, streams: CopyStreams, layers: Dict[str, List[int]]) -> None:
        self.staging = staging
        self.streams = streams
        self.layers = layers
        self.device: Dict[str, bytes] = {}
        self.inflight: Dict[str, PinnedBuffer] = {}

    def _copy(self, stream: int, name: str, buf: PinnedBuffer) -> None:
        if buf.used > self.staging.nbytes:
            raise TransferError(name)
        self.device[name] = bytes(buf.mem[: buf.used])

    def load(self, name: str) -> bool:
        stream = self.streams.get_stream()  # leak: an unknown layer returns before put_stream
        if stream is None:
            return False
        values = self.layers.get(name)
        if values is None:
            return False
        with self.staging.borrowed_buffer() as buf:  # clean: with gives it back
            buf.used = len(values) // 2
            self._copy(stream, name, buf)
        self.streams.put_stream(stream)
        return True

    def load_packed(self, name: str) -> bool:
        values = self.layers.get(name)
        if values is None:
            return False
        stream = self.streams.get_stream()  # clean: near miss, finally of the outer try
        if stream is None:
            return False
        try:
            buf = pack_int4(values, self.staging)  # clean: inner finally
            try:
                self._copy(stream, name, buf)
            except TransferError:
                return False
            finally:
                self.staging.give_back(buf)
        finally:
            self.streams.put_stream(stream)
        return True

    def start(self, name: str) -> bool:
        if name in self.inflight:
            return False
        buf = pack_int4(self.layers[name], self.staging)  # clean: owned by the in-flight table until finish
        self.inflight[name] = buf
        return True

    def finish(self, name: str) -> None:
        buf = self.inflight.pop(name)
        self.device[name] = bytes(buf.mem[: buf.used])
        self.staging.give_back(buf)

    def finish_all(self) -> None:
        for name in list(self.inflight):
            self.finish(name)

    def load_many(self, names: Sequence[str], limit: int) -> int:
        bufs = pack_groups([self.layers[n] for n in names], self.staging, limit)  # clean: given back one by one
        if bufs is None:
            return 0
        for name, buf in zip(names, bufs):
            self.device[name] = bytes(buf.mem[: buf.used])
            self.staging.give_back(buf)
        return len(bufs)

    def estimate(self, names: Sequence[str]) -> int:
        bufs = pack_groups([self.layers[n] for n in names], self.staging, 1 << 20)  # leak: only the sizes are read
        return sum(b.used for b in bufs or [])
