import functools
import logging
from typing import Callable, Dict, Optional, Tuple

import torch
import torch.nn as nn

logger = logging.getLogger(__name__)


class TilePool:
    """Bitmap allocator over a [n_tiles, block, block] score arena."""

    def __init__(self, n_tiles: int, block: int):
        self.arena = torch.empty(n_tiles, block, block)
        self.mask = 0
        self.n = n_tiles

    def alloc_tiles(self, count: int) -> Optional[Tuple[int, ...]]:
        found = []
        for i in range(self.n):
            if not (self.mask >> i) & 1:
                found.append(i)
                if len(found) == count:
                    break
        if len(found) < count:
            return None
        for i in found:
            self.mask |= 1 << i
        return tuple(found)

    def free_tiles(self, tiles) -> None:
        for i in tiles:
            self.mask &= ~(1 << i)


class LayoutCache:
    """Reference counted look-up tables for a sparsity layout."""

    def __init__(self):
        self.tables: Dict[str, torch.Tensor] = {}
        self.counts: Dict[str, int] = {}

    def lock_layout(self, key: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self.tables:
            self.tables[key] = make()
            self.counts[key] = 0
        self.counts[key] += 1
        return self.tables[key]

    def unlock_layout(self, key: str) -> None:
        self.counts[key] -= 1
        if self.counts[key] <= 0:
            del self.tables[key]
            del self.counts[key]


class BlockSparseAttention(nn.Module):
    def __init__(self, block: int, tiles: TilePool, layouts: LayoutCache, causal: bool = True):
        super().__init__()
        self.block = block
        self.tiles = tiles
        self.layouts = layouts
        self.causal = causal

    def _make_layout(self, n: int) -> torch.Tensor:
        full = torch.ones(n, n, dtype=torch.bool)
        return full.tril() if self.causal else full

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = q.shape[0] // self.block
        key = f"{n}:{self.causal}"
        layout = self.layouts.lock_layout(key, functools.partial(self._make_layout, n))  # clean: unlocked before the return
        out = torch.zeros_like(q)
        for i in range(n):
            cols = layout[i].nonzero().flatten().tolist()
            if not cols:
                continue
            tiles = self.tiles.alloc_tiles(len(cols))  # clean: near miss, freed in both arms
            if tiles is None:
                out[i * self.block : (i + 1) * self.block] = self._dense_row(q, k, v, i)
            else:
                self._row(q, k, v, out, i, cols, tiles)
                self.tiles.free_tiles(tiles)
        self.layouts.unlock_layout(key)
        return out

    def forward_strict(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Optional[torch.Tensor]:
        n = q.shape[0] // self.block
        key = f"{n}:{self.causal}"
        layout = self.layouts.lock_layout(key, functools.partial(self._make_layout, n))  # leak: the return on missing tiles keeps the lock count up
        out = torch.zeros_like(q)
        for i in range(n):
            cols = layout[i].nonzero().flatten().tolist()
            tiles = self.tiles.alloc_tiles(len(cols))  # clean: freed at the end of the round
            if tiles is None:
                logger.error("no tiles for row %d", i)
                return None
            self._row(q, k, v, out, i, cols, tiles)
            self.tiles.free_tiles(tiles)
        self.layouts.unlock_layout(key)
        return out

    def forward_windowed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        n = q.shape[0] // self.block
        out = torch.zeros_like(q)
        for i in range(n):
            cols = list(range(max(0, i - window), i + 1))
            tiles = self.tiles.alloc_tiles(len(cols))  # leak: the first tile is excluded from the slice that is freed
            if tiles is None:
                break
            self._row(q, k, v, out, i, cols, tiles)
            self.tiles.free_tiles(tiles[1:])
        return out

    def forward_two_pass(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cols = list(range(k.shape[0] // self.block))
        local = self.tiles.alloc_tiles(len(cols))  # clean: near miss, freed under the same None test and on the fallback
        far = self.tiles.alloc_tiles(len(cols))  # leak: when only the first set is missing the fallback frees nothing of it
        out = torch.zeros_like(q)
        if local is None or far is None:
            if local is not None:
                self.tiles.free_tiles(local)
            return self._dense_row(q, k, v, 0)
        self._row(q, k, v, out, 0, cols, local)
        self._row(q, k, v, out, 1, cols, far)
        self.tiles.free_tiles(local + far)
        return out

    def max_score(self, q: torch.Tensor, k: torch.Tensor) -> float:
        tiles = self.tiles.alloc_tiles(1)  # clean: freed before the return
        assert tiles is not None
        tile = self.tiles.arena[tiles[0]]
        torch.mm(q[: self.block], k[: self.block].t(), out=tile)
        peak = tile.max().item()
        self.tiles.free_tiles(tiles)
        return peak

    def score_tile(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        (t,) = self.tiles.alloc_tiles(1)  # leak: a scaled copy is returned and the tile index is forgotten
        torch.mm(q[: self.block], k[: self.block].t(), out=self.tiles.arena[t])
        return self.tiles.arena[t] * (q.shape[-1] ** -0.5)

    def _row(self, q, k, v, out, i, cols, tiles) -> None:
        b = self.block
        qi = q[i * b : (i + 1) * b]
        for c, t in zip(cols, tiles):
            torch.mm(qi, k[c * b : (c + 1) * b].t(), out=self.tiles.arena[t])
        probs = torch.softmax(torch.cat([self.tiles.arena[t] for t in tiles], dim=1), dim=-1)
        out[i * b : (i + 1) * b] = probs @ torch.cat([v[c * b : (c + 1) * b] for c in cols])

    def _dense_row(self, q, k, v, i) -> torch.Tensor:
        b = self.block
        return torch.softmax(q[i * b : (i + 1) * b] @ k.t(), dim=-1) @ v


def warm_layouts(attn: BlockSparseAttention, sizes) -> Dict[str, torch.Tensor]:
    held = {}
    for n in sizes:
        key = f"{n}:{attn.causal}"
        if key in held:
            continue
        held[key] = attn.layouts.lock_layout(key, lambda n=n: attn._make_layout(n))  # clean: cool_layouts unlocks every key of the mapping
    return held


def cool_layouts(attn: BlockSparseAttention, held: Dict[str, torch.Tensor]) -> None:
    for key in held:
        attn.layouts.unlock_layout(key)


def density(attn: BlockSparseAttention, sizes) -> float:
    held = warm_layouts(attn, sizes)  # clean: cooled after the sum
    ratio = sum(float(t.float().mean()) for t in held.values()) / max(len(held), 1)
    cool_layouts(attn, held)
    return ratio


def layout_shapes(attn: BlockSparseAttention, sizes) -> Dict[str, Tuple[int, ...]]:
    return {k: tuple(t.shape) for k, t in warm_layouts(attn, sizes).items()}  # leak: only shapes leave, the keys are never unlocked
