"""Block-sparse attention kernels that run inside a bounded workspace arena."""
from __future__ import annotations

import bisect
import logging
from typing import Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


class Region:
    __slots__ = ("offset", "nbytes")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes


class WorkspaceArena:
    """First-fit sub-allocator over one byte tensor; alloc gives None when it is full."""

    ALIGN = 256

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.storage = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._holes: List[Tuple[int, int]] = [(0, nbytes)]
        self._live: Dict[int, Region] = {}

    def alloc(self, nbytes: int) -> Optional[Region]:
        need = (nbytes + self.ALIGN - 1) // self.ALIGN * self.ALIGN
        for i, (offset, size) in enumerate(self._holes):
            if size < need:
                continue
            self._holes.pop(i)  # clean: the rest goes back as a smaller hole and the region to the caller
            if size > need:
                bisect.insort(self._holes, (offset + need, size - need))
            region = Region(offset, need)
            self._live[offset] = region
            return region
        return None

    def free(self, region: Region) -> None:
        del self._live[region.offset]
        bisect.insort(self._holes, (region.offset, region.nbytes))
        self._merge()

    def _merge(self) -> None:
        merged: List[Tuple[int, int]] = []
        for offset, size in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._holes = merged

    def view(self, region: Region, shape: Tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = 1
        for s in shape:
            count *= s
        flat = self.storage[region.offset : region.offset + region.nbytes].view(dtype)
        return flat[:count].view(shape)


class BlockLayout:
    def __init__(self, mask: Tensor, block: int) -> None:
        self.mask = mask.bool().cpu()
        self.block = block

    def rows(self) -> Iterator[Tuple[int, List[int]]]:
        for r in range(self.mask.shape[0]):
            yield r, self.mask[r].nonzero().flatten().tolist()


class BlockSparseAttention(nn.Module):
    def __init__(self, layout: BlockLayout, arena: Optional[WorkspaceArena] = None) -> None:
        super().__init__()
        self.layout = layout
        self.arena = arena

    def _row_plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v

    def _gather_blocks(self, t: Tensor, cols: List[int], dst: Tensor) -> None:
        bs = self.layout.block
        for i, c in enumerate(cols):
            dst[:, i * bs : (i + 1) * bs].copy_(t[:, c * bs : (c + 1) * bs])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bs = self.layout.block
        out = torch.zeros_like(q)
        for r, cols in self.layout.rows():
            if not cols:
                continue
            rows = slice(r * bs, (r + 1) * bs)
            width = len(cols) * bs
            nbytes = q.shape[0] * width * q.shape[2] * q.element_size()
            k_region = self.arena.alloc(nbytes) if self.arena is not None else None  # clean: near miss, freed in both rollbacks and at the end of the row
            if k_region is None:
                ks = torch.cat([k[:, c * bs : (c + 1) * bs] for c in cols], dim=1)
                vs = torch.cat([v[:, c * bs : (c + 1) * bs] for c in cols], dim=1)
                out[:, rows] = self._row_plain(q[:, rows], ks, vs)
                continue
            v_region = self.arena.alloc(nbytes)  # clean: near miss, None leaves through the rollback branch
            if v_region is None:
                self.arena.free(k_region)
                ks = torch.cat([k[:, c * bs : (c + 1) * bs] for c in cols], dim=1)
                vs = torch.cat([v[:, c * bs : (c + 1) * bs] for c in cols], dim=1)
                out[:, rows] = self._row_plain(q[:, rows], ks, vs)
                continue
            shape = (q.shape[0], width, q.shape[2])
            ks = self.arena.view(k_region, shape, q.dtype)
            vs = self.arena.view(v_region, shape, q.dtype)
            self._gather_blocks(k, cols, ks)
            self._gather_blocks(v, cols, vs)
            out[:, rows] = self._row_plain(q[:, rows], ks, vs)
            self.arena.free(v_region)
            self.arena.free(k_region)
        return out

    def scores_only(self, q: Tensor, k: Tensor) -> List[Tensor]:
        bs = self.layout.block
        results: List[Tensor] = []
        for r, cols in self.layout.rows():
            shape = (q.shape[0], bs, len(cols) * bs)
            region = self.arena.alloc(q.shape[0] * bs * max(1, len(cols)) * bs * 4)  # leak: rows without any block continue before the free
            if region is None:
                log.warning("workspace exhausted at row %d", r)
                break
            s = self.arena.view(region, shape, torch.float32)
            if not cols:
                results.append(q.new_zeros(q.shape[0], bs, 0))
                continue
            for i, c in enumerate(cols):
                block = q[:, r * bs : (r + 1) * bs] @ k[:, c * bs : (c + 1) * bs].transpose(-1, -2)
                s[:, :, i * bs : (i + 1) * bs].copy_(block)
            results.append(s.clone())
            self.arena.free(region)
        return results


def pair_of_regions(arena: WorkspaceArena, first: int, second: int) -> Optional[Tuple[Region, Region]]:
    a = arena.alloc(first)  # leak: returns None without freeing it when the second allocation fails
    if a is None:
        return None
    b = arena.alloc(second)  # clean: handed to the caller in the pair
    if b is None:
        return None
    return a, b


def row_normaliser(arena: WorkspaceArena, scores: Tensor) -> Tensor:
    pair = pair_of_regions(arena, scores.numel() * 4, scores.shape[0] * 4)  # clean: near miss, unpacked and both members freed
    if pair is None:
        return torch.softmax(scores, dim=-1)
    work, sums = pair
    w = arena.view(work, tuple(scores.shape), torch.float32).copy_(scores).exp_()
    s = arena.view(sums, (scores.shape[0],), torch.float32)
    torch.sum(w.flatten(1), dim=1, out=s)
    result = w / s.view(-1, *([1] * (scores.dim() - 1)))
    for region in pair:
        arena.free(region)
    return result


def estimate_density(arena: WorkspaceArena, layout: BlockLayout, sample: Tensor) -> float:
    pair = pair_of_regions(arena, sample.numel() * 4, layout.mask.numel())  # leak: the second member of the pair is never freed
    if pair is None:
        return float(layout.mask.float().mean())
    work, _ = pair
    buf = arena.view(work, tuple(sample.shape), torch.float32)
    buf.copy_(sample).abs_()
    density = float((buf > 1e-6).float().mean())
    arena.free(work)
    return density
