import logging
import struct
from typing import Iterator, List, Optional

import numpy as np
import zstandard

from .leases import Coordinator, Lease

log = logging.getLogger(__name__)

HEADER = struct.Struct("<4sIQ")


class CorruptShard(Exception):
    pass


class ScratchBuffers:
    """Decompression buffers; a frame never exceeds ``frame`` bytes."""

    def __init__(self, n: int, frame: int):
        self._stack: List[bytearray] = [bytearray(frame) for _ in range(n)]
        self.frame = frame
        self.extra = 0

    def get(self) -> bytearray:
        if not self._stack:
            self.extra += 1
            return bytearray(self.frame)  # clean: goes to the caller
        return self._stack.pop()  # clean: goes to the caller

    def put(self, buf: bytearray) -> None:
        self._stack.append(buf)


class ShardReader:
    """Samples of one shard, which it has a lease on."""

    def __init__(self, path: str, lease: Lease, coordinator: Coordinator, buffers: ScratchBuffers):
        self.path = path
        self.lease = lease
        self.coordinator = coordinator
        self.buffers = buffers
        self.index: Optional[bytearray] = buffers.get()  # leak: close() sets the field to None without a put
        self.file = open(path, "rb")  # clean: closed by close()
        self.position = 0

    def check(self) -> None:
        magic, version, _ = HEADER.unpack(self.file.read(HEADER.size))
        if magic != b"SHRD" or version != 3:
            raise CorruptShard(self.path)

    def frames(self) -> Iterator[memoryview]:
        unzip = zstandard.ZstdDecompressor()
        while True:
            head = self.file.read(4)
            if len(head) < 4:
                return
            (n,) = struct.unpack("<I", head)
            buf = self.buffers.get()  # leak: the raise for a short frame is ahead of the try
            payload = self.file.read(n)
            if len(payload) < n:
                raise CorruptShard(f"{self.path}: frame {self.position}")
            try:
                raw = unzip.decompress(payload, max_output_size=len(buf))
                buf[: len(raw)] = raw
                self.position += 1
                yield memoryview(buf)[: len(raw)]
            finally:
                self.buffers.put(buf)

    def samples(self, length: int) -> Iterator[np.ndarray]:
        for frame in self.frames():
            ids = np.frombuffer(bytes(frame), np.uint16)
            for at in range(0, len(ids) - length + 1, length):
                yield ids[at:at + length]

    def seek_frame(self, n: int) -> bool:
        """Skips n frames without unpacking them."""
        scratch = self.buffers.get()  # clean: all three ways out pass the finally
        try:
            for _ in range(n):
                head = self.file.read(4)
                if len(head) < 4:
                    return False
                (size,) = struct.unpack("<I", head)
                if size > len(scratch):
                    raise CorruptShard(self.path)
                self.file.readinto(memoryview(scratch)[:size])
            self.position = n
            return True
        finally:
            self.buffers.put(scratch)

    def close(self, finished: bool = False) -> None:
        self.index = None
        self.file.close()
        self.coordinator.release(self.lease, finished)
