"""Static input buffers for captured CUDA graphs and an arena for their outputs."""
from __future__ import annotations

import bisect
import logging
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, List, Optional

import torch

logger = logging.getLogger(__name__)


class InputSet:
    def __init__(self, bs: int, device: str) -> None:
        self.bs = bs
        self.ids = torch.zeros(bs, dtype=torch.long, device=device)
        self.slots = torch.zeros(bs, dtype=torch.long, device=device)
        self.graph: Optional[object] = None


class InputSets:
    """Some input sets for each captured batch size."""

    def __init__(self, sizes: List[int], per_size: int, device: str = "cuda") -> None:
        self.sizes = sorted(sizes)
        self.shelf: Dict[int, List[InputSet]] = {
            s: [InputSet(s, device) for _ in range(per_size)] for s in self.sizes
        }

    def size_for(self, n: int) -> Optional[int]:
        i = bisect.bisect_left(self.sizes, n)
        return self.sizes[i] if i < len(self.sizes) else None

    def fetch(self, n: int) -> Optional[InputSet]:
        bs = self.size_for(n)
        if bs is None or not self.shelf[bs]:
            return None
        return self.shelf[bs].pop()  # clean: returned to the caller

    def fetch_captured(self, n: int) -> Optional[InputSet]:
        bs = self.size_for(n)
        while bs is not None and self.shelf[bs]:
            s = self.shelf[bs].pop()  # leak: sets without a graph are popped and passed over
            if s.graph is not None:
                return s
        return None

    def shelve(self, s: InputSet) -> None:
        self.shelf[s.bs].append(s)


class Arena:
    """Bump arena; spans are offsets, given back in any order through a gap list."""

    def __init__(self, numel: int) -> None:
        self.data = torch.empty(numel)
        self.top = 0
        self.gaps: Dict[int, List[int]] = {}

    def carve(self, n: int) -> Optional[int]:
        if self.gaps.get(n):
            return self.gaps[n].pop()  # clean: returned to the caller
        if self.top + n > self.data.numel():
            return None
        off = self.top
        self.top += n
        return off

    def mend(self, off: int, n: int) -> None:
        self.gaps.setdefault(n, []).append(off)


class GraphRunner:
    def __init__(self, sets: InputSets, arena: Arena, model: Callable) -> None:
        self.sets = sets
        self.arena = arena
        self.model = model
        self.pinned_sets: Dict[int, InputSet] = {}

    @contextmanager
    def inputs(self, n: int) -> Iterator[Optional[InputSet]]:
        s = self.sets.fetch(n)  # clean: shelved in the finally
        try:
            yield s
        finally:
            if s is not None:
                self.sets.shelve(s)

    @contextmanager
    def inputs_for(self, ids: torch.Tensor) -> Iterator[Optional[InputSet]]:
        s = self.sets.fetch(ids.numel())  # leak: an exception in the body passes by the shelve after the yield
        if s is None:
            yield None
            return
        s.ids[: ids.numel()].copy_(ids)
        yield s
        self.sets.shelve(s)

    def capture(self, n: int) -> bool:
        s = self.sets.fetch(n)  # leak: a failed capture returns False and the set stays off the shelf
        if s is None:
            return False
        try:
            s.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(s.graph):
                self.model(s.ids, s.slots)
        except RuntimeError as e:
            logger.warning("capture of %d failed: %s", n, e)
            s.graph = None
            return False
        self.sets.shelve(s)
        return True

    def replay(self, ids: torch.Tensor) -> Optional[torch.Tensor]:
        with self.inputs(ids.numel()) as s:  # clean: the context manager shelves it
            if s is None or s.graph is None:
                return None
            s.ids[: ids.numel()].copy_(ids)
            s.graph.replay()
            return s.slots[: ids.numel()].clone()

    def run_padded(self, ids: torch.Tensor) -> torch.Tensor:
        n = ids.numel()
        s = self.sets.fetch(n)  # clean: near miss, eager mode has none and the graph mode shelves it
        if s is None:
            return self.model(ids, torch.arange(n))
        s.ids.zero_()
        s.ids[:n].copy_(ids)
        out = self.model(s.ids, s.slots)[:n].clone()
        self.sets.shelve(s)
        return out

    def pin(self, lane: int, n: int) -> bool:
        if lane in self.pinned_sets:
            return True
        s = self.sets.fetch(n)  # clean: kept in pinned_sets, unpin() shelves it
        if s is None:
            return False
        self.pinned_sets[lane] = s
        return True

    def widen(self, lane: int, n: int) -> bool:
        cur = self.pinned_sets.get(lane)
        s = self.sets.fetch(n)  # leak: a lane already wide enough returns True with the new set off the shelf
        if s is None:
            return False
        if cur is not None and cur.bs >= s.bs:
            return True
        if cur is not None:
            self.sets.shelve(cur)
        self.pinned_sets[lane] = s
        return True

    def unpin(self, lane: int) -> None:
        s = self.pinned_sets.pop(lane, None)
        if s is not None:
            self.sets.shelve(s)

    def softmax_scratch(self, logits: torch.Tensor) -> Optional[torch.Tensor]:
        n = logits.numel()
        off = self.arena.carve(n)  # clean: near miss, offset 0 is told apart from None and mended
        if off is None:
            return None
        view = self.arena.data[off : off + n]
        torch.softmax(logits.flatten(), 0, out=view)
        res = view.clone()
        self.arena.mend(off, n)
        return res

    def argmax_scratch(self, logits: torch.Tensor) -> int:
        n = logits.numel()
        off = self.arena.carve(n)  # leak: the first span has offset 0, which the truth test takes for nothing
        if not off:
            return int(logits.argmax())
        view = self.arena.data[off : off + n]
        view.copy_(logits.flatten())
        best = int(view.argmax())
        self.arena.mend(off, n)
        return best

    def double_buffer(self, a: torch.Tensor, b: torch.Tensor) -> Optional[torch.Tensor]:
        n = a.numel()
        x = self.arena.carve(n)  # leak: no room for the second span returns without mending the first
        y = self.arena.carve(n)  # clean: mended after the sum
        if x is None or y is None:
            return None
        self.arena.data[x : x + n].copy_(a.flatten())
        self.arena.data[y : y + n].copy_(b.flatten())
        out = self.arena.data[x : x + n] + self.arena.data[y : y + n]
        self.arena.mend(x, n)
        self.arena.mend(y, n)
        return out
