"""CUDA graph capture with shared memory-pool handles and static input buffers."""
from __future__ import annotations

import bisect
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Iterator, Optional

import torch

logger = logging.getLogger(__name__)


class GraphMemPools:
    """Reference counted torch.cuda graph pool handles."""

    def __init__(self) -> None:
        self._refs: dict[tuple[int, int], int] = {}
        self._named: dict[str, tuple[int, int]] = {}

    def acquire(self, name: str) -> tuple[int, int]:
        handle = self._named.get(name)
        if handle is None:
            handle = torch.cuda.graph_pool_handle()
            self._named[name] = handle
            self._refs[handle] = 0
        self._refs[handle] += 1
        return handle

    def drop(self, handle: tuple[int, int]) -> None:
        self._refs[handle] -= 1
        if self._refs[handle] == 0:
            del self._refs[handle]
            self._named = {k: v for k, v in self._named.items() if v != handle}


class StaticInputs:
    def __init__(self, max_tokens: int, hidden: int, copies: int, device: str) -> None:
        self._free = [torch.zeros(max_tokens, hidden, device=device) for _ in range(copies)]

    def checkout(self) -> Optional[torch.Tensor]:
        return self._free.pop() if self._free else None

    def checkin(self, buf: torch.Tensor) -> None:
        self._free.append(buf)

    @contextmanager
    def borrowed(self) -> Iterator[Optional[torch.Tensor]]:
        buf = self.checkout()  # clean: checked in by the finally clause
        try:
            yield buf
        finally:
            if buf is not None:
                self.checkin(buf)


@dataclass
class CapturedGraph:
    size: int
    graph: torch.cuda.CUDAGraph
    pool: tuple[int, int]
    inputs: torch.Tensor
    output: torch.Tensor
    replays: int = 0


@dataclass
class CaptureConfig:
    sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    max_graphs: int = 8
    warmup_iters: int = 2


class GraphRunner:
    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor], pools: GraphMemPools, statics: StaticInputs, cfg: CaptureConfig) -> None:
        self.model = model
        self.pools = pools
        self.statics = statics
        self.cfg = cfg
        self._graphs: dict[int, CapturedGraph] = {}
        self._piecewise: dict[str, tuple[int, int]] = {}
        self._draft: Optional[CapturedGraph] = None

    def _record(self, size: int, inputs: torch.Tensor, pool: tuple[int, int]) -> Optional[CapturedGraph]:
        view = inputs[:size]
        for _ in range(self.cfg.warmup_iters):
            self.model(view)
        g = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(g, pool=pool):
                out = self.model(view)
        except RuntimeError as e:
            logger.warning("capture of size %d failed: %s", size, e)
            return None
        return CapturedGraph(size, g, pool, inputs, out)

    def capture(self, size: int) -> bool:
        if size in self._graphs or len(self._graphs) >= self.cfg.max_graphs:
            return size in self._graphs
        inputs = self.statics.checkout()  # clean: near miss, checked in when the recording failed, otherwise owned by the graph
        if inputs is None:
            return False
        pool = self.pools.acquire("decode")  # leak: the failed recording checks the inputs in but does not drop the pool
        cg = self._record(size, inputs, pool)
        if cg is None:
            self.statics.checkin(inputs)
            return False
        self._graphs[size] = cg
        return True

    def capture_all(self) -> int:
        done = 0
        for size in sorted(self.cfg.sizes, reverse=True):
            if not self.capture(size):
                break
            done += 1
        return done

    def capture_draft(self, size: int) -> bool:
        inputs = self.statics.checkout()  # leak: a second draft capture overwrites self._draft with its inputs
        if inputs is None:
            return False
        pool = self.pools.acquire("draft")  # leak: the pool reference of the previous draft graph is overwritten too
        cg = self._record(size, inputs, pool)
        if cg is None:
            self.pools.drop(pool)
            self.statics.checkin(inputs)
            return False
        self._draft = cg
        return True

    def recapture(self, size: int) -> bool:
        old = self._graphs.pop(size, None)
        if old is not None:
            self._release(old)
        inputs = self.statics.checkout()  # clean: owned by the new graph or checked in
        if inputs is None:
            return False
        pool = self.pools.acquire("decode")  # clean: near miss, both failure and success hand it on
        cg = self._record(size, inputs, pool)
        if cg is None:
            self.statics.checkin(inputs)
            self.pools.drop(pool)
            return False
        self._graphs[size] = cg
        return True

    def piecewise_pool(self, name: str) -> tuple[int, int]:
        if name not in self._piecewise:
            self._piecewise[name] = self.pools.acquire(name)  # leak: close drops the graphs but never walks _piecewise
        return self._piecewise[name]

    def _release(self, cg: CapturedGraph) -> None:
        cg.graph.reset()
        self.pools.drop(cg.pool)
        self.statics.checkin(cg.inputs)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        sizes = sorted(self._graphs)
        i = bisect.bisect_left(sizes, x.shape[0])
        if i == len(sizes):
            return self._run_eager(x)
        cg = self._graphs[sizes[i]]
        cg.inputs[: x.shape[0]].copy_(x)
        cg.graph.replay()
        cg.replays += 1
        return cg.output[: x.shape[0]].clone()

    def _run_eager(self, x: torch.Tensor) -> torch.Tensor:
        with self.statics.borrowed() as buf:  # clean: near miss, the context manager checks in even when the body returns
            if buf is None or x.shape[0] > buf.shape[0]:
                return self.model(x)
            buf[: x.shape[0]].copy_(x)
            return self.model(buf[: x.shape[0]])

    def profile(self, size: int) -> Optional[float]:
        buf = self.statics.checkout()  # leak: the oversize early return keeps the static buffer
        if buf is None:
            return None
        if size > buf.shape[0]:
            return None
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.model(buf[:size])
        end.record()
        end.synchronize()
        self.statics.checkin(buf)
        return start.elapsed_time(end)

    def evict_cold(self, min_replays: int) -> list[int]:
        cold = [s for s, g in self._graphs.items() if g.replays < min_replays]
        for s in cold:
            self._release(self._graphs.pop(s))
        return cold

    def close(self) -> None:
        for cg in self._graphs.values():
            self._release(cg)
        self._graphs.clear()
        if self._draft is not None:
            self._release(self._draft)
            self._draft = None


def shared_pool_bytes(pools: GraphMemPools, name: str) -> int:
    handle = pools.acquire(name)  # clean: near miss, the handle is only looked at and dropped in finally
    try:
        snap = torch.cuda.memory_snapshot()
        return sum(seg["total_size"] for seg in snap if tuple(seg.get("segment_pool_id", ())) == handle)
    finally:
        pools.drop(handle)
