"""Decode-step CUDA graph runner. Graph memory and static inputs come from fixed pools."""
import bisect
import logging
from typing import Any, Callable

import torch

logger = logging.getLogger(__name__)


class GraphMemPool:
    def __init__(self, handles: list[tuple[int, int]]):
        self._spare = list(handles)
        self._used: set[tuple[int, int]] = set()

    def reserve(self) -> tuple[int, int] | None:
        if not self._spare:
            return None
        h = self._spare.pop(0)
        self._used.add(h)
        return h

    def unreserve(self, h: tuple[int, int]) -> None:
        self._used.discard(h)
        self._spare.append(h)


class StaticInputs:
    """Persistent input buffers, keyed by padded batch size."""

    def __init__(self, sizes: list[int], copies: int, device: str = "cuda"):
        self._by_size = {
            n: [torch.zeros(n, dtype=torch.long, device=device) for _ in range(copies)] for n in sizes
        }

    def lend(self, n: int) -> torch.Tensor | None:
        stack = self._by_size[n]
        return stack.pop() if stack else None

    def take_back(self, buf: torch.Tensor) -> None:
        buf.zero_()
        self._by_size[buf.numel()].append(buf)

    def lend_pair(self, n: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        ids = self.lend(n)  # leak: without a second buffer the pair is None and the first one is lost
        pos = self.lend(n)  # clean: near miss, None here means nothing taken, and ids None is only possible with pos None
        if ids is None or pos is None:
            return None
        return ids, pos


class CapturedGraph:
    def __init__(self, graph: Any, mem: tuple[int, int], ids: torch.Tensor, pos: torch.Tensor, out: torch.Tensor):
        self.graph = graph
        self.mem = mem
        self.ids = ids
        self.pos = pos
        self.out = out


class GraphRunner:
    def __init__(self, model: Callable, mem: GraphMemPool, inputs: StaticInputs, sizes: list[int]):
        self.model = model
        self.mem = mem
        self.inputs = inputs
        self.sizes = sorted(sizes)
        self.graphs: dict[int, CapturedGraph] = {}
        self.scratch: dict[str, torch.Tensor] = {}

    def _padded(self, n: int) -> int | None:
        i = bisect.bisect_left(self.sizes, n)
        return self.sizes[i] if i < len(self.sizes) else None

    def _drop(self, g: CapturedGraph) -> None:
        g.graph.reset()
        self.mem.unreserve(g.mem)
        self.inputs.take_back(g.ids)
        self.inputs.take_back(g.pos)

    def capture(self, n: int) -> bool:
        if n in self.graphs:
            return True
        pair = self.inputs.lend_pair(n)  # clean: near miss, taken back in both failure branches, else owned by the graph
        if pair is None:
            return False
        ids, pos = pair
        mem = self.mem.reserve()  # leak: a capture that runs out of memory takes the inputs back but not the graph pool handle
        if mem is None:
            self.inputs.take_back(ids)
            self.inputs.take_back(pos)
            return False
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=mem):
                out = self.model(ids, pos)
        except torch.cuda.OutOfMemoryError:
            logger.warning("no graph for batch size %d", n)
            self.inputs.take_back(ids)
            self.inputs.take_back(pos)
            return False
        self.graphs[n] = CapturedGraph(graph, mem, ids, pos, out)
        return True

    def recapture(self, n: int) -> bool:
        """After a weight update: the inputs stay, the graph and its memory are new."""
        old = self.graphs.get(n)
        if old is None:
            return self.capture(n)
        old.graph.reset()
        old.mem, prev = self.mem.reserve(), old.mem  # clean: near miss, the former handle is unreserved through prev
        self.mem.unreserve(prev)
        if old.mem is None:
            self.graphs.pop(n)
            self.inputs.take_back(old.ids)
            self.inputs.take_back(old.pos)
            return False
        old.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(old.graph, pool=old.mem):
            old.out = self.model(old.ids, old.pos)
        return True

    def replay(self, ids: torch.Tensor, pos: torch.Tensor) -> torch.Tensor | None:
        n = self._padded(ids.numel())
        g = self.graphs.get(n) if n is not None else None
        if g is None:
            return None
        g.ids[: ids.numel()].copy_(ids)
        g.pos[: pos.numel()].copy_(pos)
        g.graph.replay()
        return g.out[: ids.numel()]

    def eager(self, ids: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        n = self._padded(ids.numel())
        padded = self.inputs.lend(n) if n is not None else None  # leak: the view that goes to the model is all that remains of the lent buffer
        if padded is not None:
            padded[: ids.numel()].copy_(ids)
            ids = padded[: ids.numel()]
        return self.model(ids, pos)

    def eager_padded(self, ids: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        n = self._padded(ids.numel())
        buf = self.inputs.lend(n) if n is not None else None  # clean: near miss, guarded by the same None check at the end
        src = ids
        if buf is not None:
            buf[: ids.numel()].copy_(ids)
            src = buf[: ids.numel()]
        out = self.model(src, pos)
        if buf is not None:
            self.inputs.take_back(buf)
        return out

    def get_scratch(self, tag: str, n: int) -> torch.Tensor | None:
        buf = self.scratch.get(tag)
        if buf is not None and buf.numel() >= n:
            return buf
        size = self._padded(n)
        if size is None:
            return None
        bigger = self.inputs.lend(size)  # leak: growing a tag overwrites the smaller buffer in the scratch table
        if bigger is None:
            return None
        self.scratch[tag] = bigger
        return bigger

    def drop_scratch(self) -> None:
        for buf in self.scratch.values():
            self.inputs.take_back(buf)
        self.scratch = {}

    def warmup(self, rounds: int = 2) -> None:
        for n in reversed(self.sizes):
            ids = self.inputs.lend(n)  # clean: near miss, break happens only after it was taken back
            if ids is None:
                continue
            ok = True
            for _ in range(rounds):
                ok = self.model(ids, ids) is not None
                if not ok:
                    break
            self.inputs.take_back(ids)
            if not ok:
                break

    def reset(self) -> None:
        for g in self.graphs.values():
            self._drop(g)
        self.graphs.clear()
        self.drop_scratch()
