"""Encoder outputs kept for cross attention in an encoder-decoder server.

Each request holds one region of the encoder store from encode time to its last
decode step. Regions come from a best-fit list; a module-level registry keeps
what is shared between requests with the same audio.
"""
from __future__ import annotations

import itertools
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn as nn

_ids = itertools.count()


class Region:
    __slots__ = ("rid", "start", "length", "refs")

    def __init__(self, start: int, length: int):
        self.rid = next(_ids)
        self.start = start
        self.length = length
        self.refs = 1


class RegionStore:
    def __init__(self, frames: int, dim: int):
        self.data = torch.zeros(frames, dim)
        self._holes: List[Tuple[int, int]] = [(frames, 0)]

    def open_region(self, length: int) -> Optional[Region]:
        fits = [h for h in self._holes if h[0] >= length]
        if not fits:
            return None
        hole = min(fits)
        self._holes.remove(hole)
        size, start = hole
        if size > length:
            self._holes.append((size - length, start + length))
        return Region(start, length)

    def open_smallest(self, length: int) -> Optional[Region]:
        self._holes.sort(reverse=True)
        while self._holes:
            size, start = self._holes.pop()  # leak: a hole that is too small is popped and not put back
            if size < length:
                continue
            if size > length:
                self._holes.append((size - length, start + length))
            return Region(start, length)
        return None

    def share(self, region: Region) -> Region:
        region.refs += 1
        return region

    def close_region(self, region: Region) -> None:
        region.refs -= 1
        if region.refs == 0:
            self._holes.append((region.length, region.start))

    def frames(self, region: Region) -> torch.Tensor:
        return self.data[region.start:region.start + region.length]


class AudioRequest:
    def __init__(self, audio_key: str, features: torch.Tensor):
        self.audio_key = audio_key
        self.features = features
        self.region: Optional[Region] = None
        self.aux: List[Region] = []


class EncoderServer(nn.Module):
    def __init__(self, encoder: nn.Module, store: RegionStore):
        super().__init__()
        self.encoder = encoder
        self.store = store
        self.shared: Dict[str, Region] = {}

    def encode(self, req: AudioRequest) -> bool:
        if req.region is not None:
            return True
        hit = self.shared.get(req.audio_key)
        if hit is not None:
            req.region = self.store.share(hit)  # clean: kept on the request, retire() closes it
            return True
        region = self.store.open_region(req.features.shape[0])  # clean: kept on the request, retire() closes it
        if region is None:
            return False
        self.store.frames(region).copy_(self.encoder(req.features))
        req.region = region
        return True

    def encode_shared(self, req: AudioRequest) -> bool:
        if req.region is not None or req.audio_key in self.shared:
            return self.encode(req)
        region = self.store.open_region(req.features.shape[0])  # clean: the registry owns this reference
        if region is None:
            return False
        self.store.frames(region).copy_(self.encoder(req.features))
        self.shared[req.audio_key] = region
        req.region = self.store.share(region)  # clean: kept on the request
        return True

    def unshare(self, audio_key: str) -> None:
        region = self.shared.pop(audio_key, None)
        if region is not None:
            self.store.close_region(region)

    def retire(self, req: AudioRequest) -> None:
        if req.region is not None:
            self.store.close_region(req.region)
            req.region = None
        for r in req.aux:
            self.store.close_region(r)
        req.aux.clear()

    def encode_checked(self, req: AudioRequest) -> bool:
        region = self.store.open_region(req.features.shape[0])  # leak: an encoder output with NaN returns False with it open
        if region is None:
            return False
        y = self.encoder(req.features)
        if torch.isnan(y).any():
            return False
        self.store.frames(region).copy_(y)
        self.retire(req)
        req.region = region
        return True

    def reencode(self, req: AudioRequest, features: torch.Tensor) -> bool:
        region = self.store.open_region(features.shape[0])  # clean: retire() closes what it takes the place of
        if region is None:
            return False
        self.store.frames(region).copy_(self.encoder(features))
        self.retire(req)
        req.features, req.region = features, region
        return True

    def encode_chunks(self, req: AudioRequest, chunk: int) -> bool:
        opened: List[Region] = []
        for piece in req.features.split(chunk):
            region = self.store.open_region(piece.shape[0])  # leak: earlier chunks stay open when one does not fit
            if region is None:
                return False
            opened.append(region)
            self.store.frames(region).copy_(self.encoder(piece))
        req.aux.extend(opened)
        return True

    def encode_views(self, req: AudioRequest, views: List[torch.Tensor]) -> bool:
        for v in views:
            region = self.store.open_region(v.shape[0])  # clean: near miss, already on req.aux, which retire() closes
            if region is None:
                self.retire(req)
                return False
            req.aux.append(region)
            self.store.frames(region).copy_(self.encoder(v))
        return True

    def _encode_into(self, features: torch.Tensor) -> Optional[Region]:
        region = self.store.open_region(features.shape[0])  # clean: returned to the caller
        if region is not None:
            self.store.frames(region).copy_(self.encoder(features))
        return region

    def embed(self, features: torch.Tensor) -> Optional[torch.Tensor]:
        region = self._encode_into(features)  # clean: closed after the mean is taken
        if region is None:
            return None
        mean = self.store.frames(region).mean(0)
        self.store.close_region(region)
        return mean

    def embed_first(self, features: torch.Tensor) -> torch.Tensor:
        region = self._encode_into(features)  # leak: the frame is copied out and the region is dropped
        if region is None:
            return torch.zeros(self.store.data.shape[1])
        return self.store.frames(region)[0].clone()


class CrossAttention(nn.Module):
    def __init__(self, dim: int, server: EncoderServer):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.server = server
        self._memory: Optional[Region] = None
        self._borrowed = False

    def bind(self, req: AudioRequest) -> None:
        self.unbind()
        self._memory = self.server.store.share(req.region)  # clean: unbind() runs before each bind and at the end

    def unbind(self) -> None:
        if self._memory is not None:
            self.server.store.close_region(self._memory)
            self._memory = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._memory is None:
            return torch.zeros_like(x)
        mem = self.server.store.frames(self._memory)
        return (self.q(x) @ mem.T).softmax(-1) @ mem

    def attend(self, req: AudioRequest, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        region = self.server.store.share(req.region)  # leak: with a scale the early return keeps the reference
        mem = self.server.store.frames(region)
        if scale is not None:
            return (self.q(x) @ mem.T).mul(scale).softmax(-1) @ mem
        y = (self.q(x) @ mem.T).softmax(-1) @ mem
        self.server.store.close_region(region)
        return y


class CascadedCrossAttention(nn.Module):
    """Reads two requests at once; the second memory follows whoever was set last."""

    def __init__(self, dim: int, store: RegionStore):
        super().__init__()
        self.store = store
        self.proj = nn.Linear(2 * dim, dim)
        self.near: Optional[Region] = None
        self.far: Optional[Region] = None

    def set_near(self, region: Region) -> None:
        old, self.near = self.near, self.store.share(region)  # clean: near miss, the old reference is closed next
        if old is not None:
            self.store.close_region(old)

    def set_far(self, region: Region) -> None:
        self.far = self.store.share(region)  # leak: setting it again overwrites the reference held

    def reset(self) -> None:
        for r in (self.near, self.far):
            if r is not None:
                self.store.close_region(r)
        self.near = self.far = None
