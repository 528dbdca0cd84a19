"""Tensors into chunks."""
from __future__ import annotations

import hashlib

import torch

from .staging import Chunk, StagingRing


def stage_tensor(ring: StagingRing, t: torch.Tensor) -> Chunk:
    """A leased chunk with the bytes of ``t``. The caller ends the lease."""
    chunk = ring.lease_wait()  # clean: returned to the caller
    raw = t.detach().contiguous().view(-1).view(torch.uint8)
    chunk.mem[: raw.numel()].copy_(raw)
    chunk.filled = raw.numel()
    return chunk


def digest(ring: StagingRing, t: torch.Tensor) -> str:
    chunk = stage_tensor(ring, t)  # leak: hashed and dropped
    return hashlib.blake2b(chunk.bytes(), digest_size=16).hexdigest()
