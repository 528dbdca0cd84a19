"""Pinned staging arena for the ranking feature encoders.

Chunks come in a handful of size classes.  An encoder carves what it needs, fills
it on the CPU and the uploader copies it to the device.  Everything that is carved
has to be mended, or the budget shrinks until the trainer stalls.
"""
from __future__ import annotations

import bisect
import logging
import threading
from collections import defaultdict
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)

_CLASSES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)


@dataclass
class Chunk:
    cls: int
    storage: torch.Tensor
    used: int = 0

    def view(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        itemsize = torch.empty((), dtype=dtype).element_size()
        return self.storage[: count * itemsize].view(dtype)


class StagingArena:
    def __init__(self, budget: int) -> None:
        self._free: dict[int, list[Chunk]] = defaultdict(list)
        self._budget = budget
        self._held = 0
        self._mu = threading.Lock()

    @staticmethod
    def _class_for(nbytes: int) -> int | None:
        i = bisect.bisect_left(_CLASSES, nbytes)
        return _CLASSES[i] if i < len(_CLASSES) else None

    def carve(self, nbytes: int) -> Chunk | None:
        cls = self._class_for(nbytes)
        if cls is None:
            return None
        with self._mu:
            if self._free[cls]:
                chunk = self._free[cls].pop()  # clean: returned to the caller
                chunk.used = nbytes
                return chunk
            if self._held + cls > self._budget:
                return None
            self._held += cls
        return Chunk(cls, torch.empty(cls, dtype=torch.uint8, pin_memory=True), nbytes)

    def carve_oversized(self, nbytes: int, ceiling: int) -> Chunk | None:
        """Take the smallest idle chunk that fits, of whatever class, up to a ceiling."""
        with self._mu:
            for cls in _CLASSES:
                if cls < nbytes or not self._free[cls]:
                    continue
                chunk = self._free[cls].pop()  # leak: dropped when its class is above the ceiling
                if chunk.cls > ceiling:
                    log.debug("no chunk below %d for %d", ceiling, nbytes)
                    return None
                chunk.used = nbytes
                return chunk
        return None

    def mend(self, chunk: Chunk) -> None:
        chunk.used = 0
        with self._mu:
            self._free[chunk.cls].append(chunk)

    def carve_many(self, sizes: list[int]) -> list[Chunk] | None:
        got: list[Chunk] = []
        for n in sizes:
            chunk = self.carve(n)  # clean: near miss, the partial list is mended before returning None
            if chunk is None:
                for c in got:
                    self.mend(c)
                return None
            got.append(chunk)
        return got


class DenseEncoder:
    def __init__(self, arena: StagingArena, device: torch.device) -> None:
        self.arena = arena
        self.device = device

    def encode(self, rows: list[list[float]]) -> torch.Tensor:
        width = len(rows[0])
        chunk = self.arena.carve(4 * width * len(rows))  # clean: mended in finally
        if chunk is None:
            raise MemoryError("staging arena exhausted")
        try:
            host = chunk.view(torch.float32, width * len(rows))
            host.copy_(torch.tensor(rows, dtype=torch.float32).flatten())
            return host.to(self.device).view(len(rows), width)
        finally:
            self.arena.mend(chunk)

    def encode_clipped(self, row: list[float], lo: float, hi: float) -> torch.Tensor | None:
        chunk = self.arena.carve(4 * len(row))  # leak: not mended when the row has no finite value
        if chunk is None:
            return None
        host = chunk.view(torch.float32, len(row))
        host.copy_(torch.tensor(row))
        if not torch.isfinite(host).any():
            return None
        out = host.clamp(lo, hi).to(self.device)
        self.arena.mend(chunk)
        return out


class SparseEncoder:
    def __init__(self, arena: StagingArena, device: torch.device) -> None:
        self.arena = arena
        self.device = device

    def encode(self, bags: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor] | None:
        total = sum(len(b) for b in bags)
        ids = self.arena.carve(8 * total)  # leak: not mended when the offsets cannot be carved
        if ids is None:
            return None
        offs = self.arena.carve(8 * (len(bags) + 1))  # clean: mended after the upload
        if offs is None:
            return None
        out = self._upload(bags, ids, offs, total)
        self.arena.mend(offs)
        self.arena.mend(ids)
        return out

    def encode_weighted(self, bags, weights) -> tuple[torch.Tensor, torch.Tensor] | None:
        total = sum(len(b) for b in bags)
        ids = self.arena.carve(8 * total)  # clean: near miss, rolled back when w is None
        w = self.arena.carve(4 * total) if ids is not None else None  # clean: mended after the upload
        if w is None:
            if ids is not None:
                self.arena.mend(ids)
            return None
        flat = ids.view(torch.int64, total)
        flat.copy_(torch.tensor([i for b in bags for i in b]))
        wv = w.view(torch.float32, total)
        wv.copy_(torch.tensor([x for ws in weights for x in ws]))
        out = flat.to(self.device), wv.to(self.device)
        for c in (ids, w):
            self.arena.mend(c)
        return out

    def _upload(self, bags, ids: Chunk, offs: Chunk, total: int):
        flat = ids.view(torch.int64, total)
        flat.copy_(torch.tensor([i for b in bags for i in b]))
        ov = offs.view(torch.int64, len(bags) + 1)
        ov[0] = 0
        torch.cumsum(torch.tensor([len(b) for b in bags]), 0, out=ov[1:])
        return flat.to(self.device), ov.to(self.device)

    def encode_all(self, batches: list[list[list[int]]]) -> list[torch.Tensor]:
        out = []
        for bags in batches:
            total = sum(len(b) for b in bags)
            chunk = self.arena.carve(8 * max(total, 1))  # leak: continue on an empty batch skips mend
            if chunk is None:
                break
            if total == 0:
                out.append(torch.empty(0, dtype=torch.int64, device=self.device))
                continue
            flat = chunk.view(torch.int64, total)
            flat.copy_(torch.tensor([i for b in bags for i in b]))
            out.append(flat.to(self.device))
            self.arena.mend(chunk)
        return out


class SequenceBuffer:
    """Grows with the longest user history seen so far."""

    def __init__(self, arena: StagingArena) -> None:
        self.arena = arena
        self.chunk: Chunk | None = None
        self.spill: Chunk | None = None

    def reserve(self, nbytes: int) -> None:
        if self.chunk is not None and self.chunk.cls >= nbytes:
            return
        bigger = self.arena.carve(nbytes)  # clean: near miss, the old chunk is mended before the rebind
        if bigger is None:
            raise MemoryError(nbytes)
        if self.chunk is not None:
            bigger.storage[: self.chunk.used].copy_(self.chunk.storage[: self.chunk.used])
            self.arena.mend(self.chunk)
        self.chunk = bigger

    def reserve_spill(self, nbytes: int) -> None:
        if self.spill is None or self.spill.cls < nbytes:
            self.spill = self.arena.carve(nbytes)  # leak: the smaller spill chunk is overwritten on growth

    def close(self) -> None:
        for c in (self.chunk, self.spill):
            if c is not None:
                self.arena.mend(c)
        self.chunk = self.spill = None


def pack_embeddings(arena: StagingArena, tables: list[torch.Tensor]) -> torch.Tensor | None:
    chunks = arena.carve_many([t.numel() * 4 for t in tables])  # clean: every chunk is mended in finally
    if chunks is None:
        return None
    try:
        parts = []
        for t, c in zip(tables, chunks):
            v = c.view(torch.float32, t.numel())
            v.copy_(t.flatten())
            parts.append(v.clone())
        return torch.cat(parts)
    finally:
        for c in chunks:
            arena.mend(c)
