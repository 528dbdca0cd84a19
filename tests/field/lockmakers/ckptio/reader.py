from __future__ import annotations

import torch

from .arena import ChunkArena, Lanes


class CheckpointReader:
    def __init__(self, arena: ChunkArena, lanes: Lanes, bucket):
        self.arena = arena
        self.lanes = lanes
        self.bucket = bucket

    def read(self, name: str) -> torch.Tensor | None:
        chunk = self.arena.cut()  # clean: dropped after the clone
        if chunk is None:
            return None
        n = self.bucket.get_into(name, chunk.mem)
        out = chunk.mem[:n].clone()
        chunk.drop()
        return out

    def read_parts(self, names: list[str]) -> torch.Tensor | None:
        chunks = self.arena.cut_many(len(names))  # leak: fewer chunks than names returns None with the short list
        if len(chunks) < len(names):
            return None
        parts = []
        for name, c in zip(names, chunks):
            n = self.bucket.get_into(name, c.mem)
            parts.append(c.mem[:n].clone())
            c.drop()
        return torch.cat(parts)
