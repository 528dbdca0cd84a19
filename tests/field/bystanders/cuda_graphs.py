"""Captured decode graphs for fixed batch sizes."""
from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional

import torch

log = logging.getLogger(__name__)


class StaticInputs:
    """Static input tensors shared by the graphs of one size class."""

    def __init__(self, max_bs: int, copies: int = 8) -> None:
        self.max_bs = max_bs
        self._ring = [{"ids": torch.zeros(max_bs, dtype=torch.long), "pos": torch.zeros(max_bs, dtype=torch.long)} for _ in range(copies)]

    def open_slot(self) -> Dict[str, torch.Tensor]:
        if not self._ring:
            raise RuntimeError("all static inputs are used by captured graphs")
        return self._ring.pop(0)

    def close_slot(self, slot: Dict[str, torch.Tensor]) -> None:
        slot["ids"].zero_()
        slot["pos"].zero_()
        self._ring.append(slot)


@dataclass
class GraphEntry:
    size: int
    inputs: Dict[str, torch.Tensor]
    graph: Optional[Any] = None
    output: Optional[torch.Tensor] = None


class GraphRunner:
    SIZES = [1, 2, 4, 8, 16, 32]

    def __init__(self, model: Callable[..., torch.Tensor], inputs: StaticInputs, enabled: bool = True) -> None:
        self.model = model
        self.inputs = inputs
        self.enabled = enabled
        self.entries: Dict[int, GraphEntry] = {}
        self._eager_slot: Optional[Dict[str, torch.Tensor]] = None

    def size_for(self, n: int) -> Optional[int]:
        i = bisect.bisect_left(self.SIZES, n)
        return self.SIZES[i] if i < len(self.SIZES) else None

    def capture(self, size: int) -> GraphEntry:
        if size in self.entries:
            return self.entries[size]
        slot = self.inputs.open_slot()  # clean: the entry holds it until release_graphs
        entry = GraphEntry(size, slot)
        self.entries[size] = entry
        if self.enabled and torch.cuda.is_available():
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                entry.output = self.model(slot["ids"][:size], slot["pos"][:size])
            entry.graph = g
        return entry

    def capture_all(self) -> None:
        for size in reversed(self.SIZES):
            self.capture(size)

    def run_eager(self, ids: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        slot = self.inputs.open_slot()  # clean: closed after the forward
        n = len(ids)
        slot["ids"][:n].copy_(ids)
        slot["pos"][:n].copy_(pos)
        out = self.model(slot["ids"][:n], slot["pos"][:n])
        self.inputs.close_slot(slot)
        return out

    def run(self, ids: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        size = self.size_for(len(ids))
        entry = self.entries.get(size) if size else None
        if entry is None or entry.graph is None:
            return self.run_eager(ids, pos)
        entry.inputs["ids"][: len(ids)].copy_(ids)
        entry.inputs["pos"][: len(pos)].copy_(pos)
        entry.graph.replay()
        return entry.output[: len(ids)]

    def profile(self, iters: int) -> List[float]:
        slot = self.inputs.open_slot()  # leak: without a GPU the profile returns an empty list and the slot stays open
        if not torch.cuda.is_available():
            return []
        times = []
        for _ in range(iters):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            self.model(slot["ids"], slot["pos"])
            b.record()
            b.synchronize()
            times.append(a.elapsed_time(b))
        self.inputs.close_slot(slot)
        return times

    def compare(self, ids: torch.Tensor, pos: torch.Tensor) -> bool:
        left = self.inputs.open_slot()  # clean: near miss, the tuple loop closes both
        right = self.inputs.open_slot()  # clean: near miss, the tuple loop closes both
        same = True
        for slot in (left, right):
            slot["ids"][: len(ids)].copy_(ids)
            slot["pos"][: len(pos)].copy_(pos)
        a = self.model(left["ids"], left["pos"])
        b = self.model(right["ids"], right["pos"])
        if not torch.allclose(a, b):
            log.error("two forwards differ")
            same = False
        for slot in (left, right):
            self.inputs.close_slot(slot)
        return same

    def eager_slot(self) -> Dict[str, torch.Tensor]:
        if self._eager_slot is None:
            self._eager_slot = self.inputs.open_slot()  # clean: near miss, taken once, close gives it up
        return self._eager_slot

    def memory_estimate(self) -> int:
        total = 0
        for size in self.SIZES:
            slot = self.inputs.open_slot()  # leak: the break on a large estimate passes over close_slot
            total += sum(t.element_size() * size for t in slot.values())
            if total > 1 << 30:
                break
            self.inputs.close_slot(slot)
        return total

    def release_graphs(self) -> None:
        for entry in self.entries.values():
            entry.graph = None
            self.inputs.close_slot(entry.inputs)
        self.entries.clear()

    def close(self) -> None:
        self.release_graphs()
        if self._eager_slot is not None:
            self.inputs.close_slot(self._eager_slot)
            self._eager_slot = None
