from __future__ import annotations

import zlib

import torch

from .arena import Chunk, ChunkArena


def tensor_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().cpu().view(-1).view(torch.uint8)


def load_chunk(arena: ChunkArena, data: torch.Tensor) -> Chunk | None:
    """The data in a chunk, or None when the arena is empty or the data too long."""
    chunk = arena.cut()  # leak: data longer than a chunk returns None without drop
    if chunk is None:
        return None
    if data.numel() > arena.nbytes:
        return None
    chunk.mem[: data.numel()].copy_(data)
    chunk.length = data.numel()
    return chunk


def crc(chunk: Chunk) -> int:
    return zlib.crc32(chunk.mem[: chunk.length].numpy().tobytes())


def crc_and_drop(chunk: Chunk) -> int:
    value = crc(chunk)
    chunk.drop()
    return value
