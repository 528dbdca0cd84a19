from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, List, Optional

import numpy as np

from .arena import Chunk, ChunkArena
from .cache import TieredKV

logger = logging.getLogger(__name__)


@dataclass
class EngineConfig:
    window: int = 2
    use_sink: bool = True
    recompute: bool = False
    double_buffer: bool = False


class LongContextEngine:
    def __init__(self, arena: ChunkArena, cfg: EngineConfig, layer: Callable[[np.ndarray], np.ndarray]) -> None:
        self.arena = arena
        self.cfg = cfg
        self.layer = layer

    def prefill(self, x: np.ndarray) -> Optional[TieredKV]:
        kv = TieredKV(self.arena, self.cfg.use_sink, self.cfg.window)
        kv.begin()
        step = self.arena.tokens
        for i in range(0, len(x), step):
            if not kv.append(self.layer(x[i : i + step])):
                kv.end()
                return None
        return kv

    def forward_chunk(self, x: np.ndarray) -> np.ndarray:
        work = None
        if self.cfg.recompute:
            work = self.arena.take()  # clean: near miss, the same config flag guards the release
        y = self.layer(x)
        if work is not None:
            work.tensor[: len(x)] = y
        if self.cfg.recompute and work is not None:
            self.arena.untake(work)
        return y

    def forward_pair(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Two chunks at once; the second buffer only when double buffering."""
        first = self.arena.take()  # clean: released on every way out
        if first is None:
            return np.concatenate([self.layer(a), self.layer(b)])
        second = self.arena.take() if self.cfg.double_buffer else None  # leak: without recompute the second buffer is not released
        first.tensor[: len(a)] = self.layer(a)
        target = first if second is None else second
        out_a = first.tensor[: len(a)].copy()
        target.tensor[: len(b)] = self.layer(b)
        out = np.concatenate([out_a, target.tensor[: len(b)]])
        if self.cfg.recompute and second is not None:
            self.arena.untake(second)
        self.arena.untake(first)
        return out

    def attend_cold(self, kv: TieredKV, q: np.ndarray, indices: List[int]) -> float:
        total = 0.0
        for idx in indices:
            chunk = kv.recall(idx)  # leak: an all-zero chunk takes the continue past untake
            if chunk is None:
                continue
            if not chunk.tensor.any():
                continue
            total += float((chunk.tensor.sum(0) * q).sum())
            self.arena.untake(chunk)
        return total

    def attend_recent(self, kv: TieredKV, q: np.ndarray) -> float:
        return sum(float((c.tensor.sum(0) * q).sum()) for c in kv.recent)

    def peak_norm(self, kv: TieredKV, idx: int) -> float:
        chunk = kv.recall(idx)  # clean: near miss, released in the finally when there is one
        try:
            return float(np.abs(chunk.tensor).max()) if chunk else 0.0
        finally:
            if chunk:
                self.arena.untake(chunk)

    def mlp_chunked(self, x: np.ndarray, want: int) -> np.ndarray:
        run = self.arena.take_run(want)  # clean: near miss, None falls back, otherwise untake_all in the finally
        if run is None:
            return self.layer(x)
        try:
            parts = np.array_split(x, want)
            for c, p in zip(run, parts):
                c.tensor[: len(p)] = self.layer(p)
            return np.concatenate([c.tensor[: len(p)] for c, p in zip(run, parts)])
        finally:
            self.arena.untake_all(run)

    def mlp_elastic(self, x: np.ndarray, want: int) -> np.ndarray:
        run = self.arena.take_upto(want, at_least=2)  # leak: only the chunks that were used go back
        if not run:
            return self.layer(x)
        out: List[np.ndarray] = []
        used = 0
        for c, lo in zip(run, range(0, len(x), self.arena.tokens)):
            part = x[lo : lo + self.arena.tokens]
            c.tensor[: len(part)] = self.layer(part)
            out.append(c.tensor[: len(part)].copy())
            used += 1
        done = used * self.arena.tokens
        if done < len(x):
            out.append(self.layer(x[done:]))
        self.arena.untake_all(run[:used])
        return np.concatenate(out)
