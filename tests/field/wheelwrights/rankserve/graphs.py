from __future__ import annotations

from typing import Callable

import torch

from .arena import ArenaSet, Region


class GraphSet:
    """Captured graphs by batch size, each with a region for its static input."""

    def __init__(self, arenas: ArenaSet, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.arenas = arenas
        self.fn = fn
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Region, torch.Tensor]] = {}

    def capture(self, batch: int) -> bool:
        region = self.arenas.place(batch)  # leak: not lifted when the capture fails
        if region is None:
            return False
        g = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(g):
                out = self.fn(region.tensor)
        except RuntimeError:
            return False
        self._install(batch, g, region, out)
        return True

    def _install(self, batch: int, g, region: Region, out: torch.Tensor) -> None:
        prev = self.graphs.pop(batch, None)
        if prev is not None:
            prev[0].reset()
            self.arenas.lift(prev[1])
        self.graphs[batch] = (g, region, out)

    def warm_eager(self, batches: list[int]) -> list[int]:
        """Runs the model once per size so that the kernels are compiled."""
        done = []
        for b in batches:
            region = self.arenas.place(b)  # leak: continue for a captured size skips lift
            if region is None:
                break
            if b in self.graphs:
                continue
            self.fn(region.tensor)
            done.append(b)
            self.arenas.lift(region)
        return done

    def replay(self, x: torch.Tensor) -> torch.Tensor | None:
        entry = self.graphs.get(x.shape[0])
        if entry is None:
            return None
        g, region, out = entry
        region.tensor.copy_(x)
        g.replay()
        return out.clone()

    def reset(self) -> None:
        while self.graphs:
            _, (g, region, _) = self.graphs.popitem()
            g.reset()
            self.arenas.lift(region)
