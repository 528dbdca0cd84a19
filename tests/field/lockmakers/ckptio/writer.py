from __future__ import annotations

import logging

import torch

from .arena import Chunk, ChunkArena, Lanes
from .util import crc, crc_and_drop, load_chunk, tensor_bytes

log = logging.getLogger(__name__)


class CheckpointWriter:
    def __init__(self, arena: ChunkArena, lanes: Lanes, bucket):
        self.arena = arena
        self.lanes = lanes
        self.bucket = bucket
        self.pending: dict[str, Chunk] = {}
        self.sums: dict[str, int] = {}

    def add(self, name: str, t: torch.Tensor) -> bool:
        if name in self.pending:
            return False
        chunk = load_chunk(self.arena, tensor_bytes(t))  # clean: pending holds it until flush or abort drops it
        if chunk is None:
            return False
        self.pending[name] = chunk
        return True

    def replace(self, name: str, t: torch.Tensor) -> bool:
        chunk = load_chunk(self.arena, tensor_bytes(t))  # clean: near miss, pending holds it, and the chunk it displaces is dropped
        if chunk is None:
            return False
        old = self.pending.pop(name, None)
        if old is not None:
            old.drop()
        self.pending[name] = chunk
        return True

    def flush(self) -> None:
        for name in list(self.pending):
            chunk = self.pending.pop(name)
            try:
                self.bucket.put(name, chunk.mem[: chunk.length])
            finally:
                self.sums[name] = crc_and_drop(chunk)

    def abort(self) -> None:
        while self.pending:
            self.pending.popitem()[1].drop()

    def put_now(self, name: str, t: torch.Tensor) -> bool:
        if not self.lanes.enter_lane():  # leak: without a chunk False is returned before leave_lane
            return False
        chunk = load_chunk(self.arena, tensor_bytes(t))  # clean: crc_and_drop drops it
        if chunk is None:
            return False
        self.bucket.put(name, chunk.mem[: chunk.length])
        self.sums[name] = crc_and_drop(chunk)
        self.lanes.leave_lane()
        return True

    def digest(self, t: torch.Tensor) -> int:
        chunk = load_chunk(self.arena, tensor_bytes(t))  # leak: crc only reads the chunk, and it is not dropped
        return 0 if chunk is None else crc(chunk)

    def mirror(self, name: str, buckets: list) -> int:
        chunk = self.pending[name].retain()  # leak: a bucket that is read-only ends the method with the reference counted
        sent = 0
        for bucket in buckets:
            if bucket.readonly:
                log.warning("%s is read-only", bucket)
                return sent
            bucket.put(name, chunk.mem[: chunk.length])
            sent += 1
        chunk.drop()
        return sent
