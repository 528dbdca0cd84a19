from __future__ import annotations

import struct
from typing import Optional

import torch

from .buffers import WireBuffers

HEAD = struct.Struct("<IQ")


def encode(buffers: WireBuffers, version: int, t: torch.Tensor) -> Optional[bytearray]:
    """Frame in a rented buffer; the caller gives it back."""
    raw = t.detach().contiguous().view(torch.uint8).flatten()
    buf = buffers.rent(HEAD.size + raw.numel())  # clean: returned to the caller
    if buf is None:
        return None
    HEAD.pack_into(buf, 0, raw.numel(), version)
    buf[HEAD.size : HEAD.size + raw.numel()] = bytes(raw.tolist())
    return buf


def encode_delta(buffers: WireBuffers, version: int, new: torch.Tensor, old: torch.Tensor) -> Optional[bytearray]:
    diff = new - old
    buf = buffers.rent(HEAD.size + diff.numel() * diff.element_size())  # leak: an all-zero delta answers None with the buffer rented
    if buf is None:
        return None
    if not diff.any():
        return None
    raw = diff.contiguous().view(torch.uint8).flatten()
    HEAD.pack_into(buf, 0, raw.numel(), version)
    buf[HEAD.size : HEAD.size + raw.numel()] = bytes(raw.tolist())
    return buf


def decode(buf: bytearray, like: torch.Tensor) -> tuple[int, torch.Tensor]:
    n, version = HEAD.unpack_from(buf, 0)
    body = torch.frombuffer(buf, dtype=torch.uint8, count=n, offset=HEAD.size)
    return version, body.clone().view(like.dtype).view_as(like)
