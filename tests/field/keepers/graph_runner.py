"""Captured graphs for decode: graph memory pools, static input buffers and capture sessions."""
from __future__ import annotations

import contextlib
import logging
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class GraphPools:
    """Hands out memory pool ids for capture; an id may only serve one runner at a time."""

    def __init__(self, limit: int) -> None:
        self._ids: List[Any] = [torch.cuda.graph_pool_handle() for _ in range(limit)]

    def acquire(self) -> Optional[Any]:
        if not self._ids:
            return None
        return self._ids.pop()

    def release(self, pool_id: Any) -> None:
        self._ids.append(pool_id)


class StaticInputs:
    def __init__(self, per_size: int, sizes: List[int], device: str) -> None:
        self._free: Dict[int, List[torch.Tensor]] = {
            s: [torch.zeros(s, dtype=torch.long, device=device) for _ in range(per_size)] for s in sizes
        }

    def obtain(self, size: int) -> Optional[torch.Tensor]:
        for have in sorted(self._free):
            if have >= size and self._free[have]:
                return self._free[have].pop()
        return None

    def restore(self, buf: torch.Tensor) -> None:
        self._free[buf.numel()].append(buf)


class GraphRunner:
    def __init__(self, model: Callable[[torch.Tensor], torch.Tensor], pools: GraphPools, inputs: StaticInputs) -> None:
        self.model = model
        self.pools = pools
        self.inputs = inputs
        self.graphs: Dict[int, Dict[str, Any]] = {}
        self.draft: Optional[Any] = None
        self.shadow: Optional[torch.Tensor] = None

    def capture(self, size: int) -> bool:
        if size in self.graphs:
            return True
        pool = self.pools.acquire()  # clean: near miss, released without inputs and upon a failed capture, else in graphs
        if pool is None:
            return False
        buf = self.inputs.obtain(size)  # clean: restored upon a failed capture, else in graphs until evict
        if buf is None:
            self.pools.release(pool)
            return False
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool):
                out = self.model(buf)
        except RuntimeError:
            logger.exception("capture of size %d failed", size)
            self.inputs.restore(buf)
            self.pools.release(pool)
            return False
        self.graphs[size] = {"graph": graph, "pool": pool, "buf": buf, "out": out}
        return True

    def evict(self, size: int) -> None:
        rec = self.graphs.pop(size)
        self.inputs.restore(rec["buf"])
        self.pools.release(rec["pool"])

    def recapture(self, size: int) -> bool:
        pool = self.pools.acquire()  # leak: the record's former pool id is written over and not released
        if pool is None:
            return False
        rec = self.graphs.get(size)
        if rec is None:
            self.pools.release(pool)
            return False
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            rec["out"] = self.model(rec["buf"])
        rec["graph"] = graph
        rec["pool"] = pool
        return True

    def rebind_inputs(self, size: int) -> bool:
        rec = self.graphs[size]
        fresh = self.inputs.obtain(size)  # clean: near miss, replaces a buffer that is restored first
        if fresh is None:
            return False
        self.inputs.restore(rec["buf"])
        rec["buf"] = fresh
        return True

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        size = tokens.numel()
        rec = self.graphs.get(size)
        if rec is not None:
            rec["buf"].copy_(tokens)
            rec["graph"].replay()
            return rec["out"].clone()
        buf = self.inputs.obtain(size)  # clean: restored after the eager call
        if buf is None:
            return self.model(tokens)
        buf[:size].copy_(tokens)
        out = self.model(buf)[:size].clone()
        self.inputs.restore(buf)
        return out

    def run_padded(self, tokens: torch.Tensor, pad_to: int) -> torch.Tensor:
        buf = self.inputs.obtain(pad_to)  # leak: an output of exactly the wanted length returns without restore
        if buf is None:
            return self.model(tokens)
        buf.zero_()
        buf[:tokens.numel()].copy_(tokens)
        out = self.model(buf)
        if out.shape[0] == tokens.numel():
            return out.clone()
        out = out[:tokens.numel()].clone()
        self.inputs.restore(buf)
        return out

    def warm(self, sizes: List[int]) -> List[int]:
        done: List[int] = []
        for size in sizes:
            buf = self.inputs.obtain(size)  # leak: kept when the model raises for the size and the loop goes on
            if buf is None:
                continue
            try:
                self.model(buf)
            except RuntimeError:
                logger.warning("size %d does not fit", size)
                continue
            self.inputs.restore(buf)
            done.append(size)
        return done

    def time_sizes(self, sizes: List[int]) -> Dict[int, float]:
        times: Dict[int, float] = {}
        for size in sizes:
            buf = self.inputs.obtain(size)  # clean: near miss, restored in the handler's finally as well
            if buf is None:
                continue
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            try:
                start.record()
                self.model(buf)
                stop.record()
                stop.synchronize()
                times[size] = start.elapsed_time(stop)
            except RuntimeError:
                continue
            finally:
                self.inputs.restore(buf)
        return times

    @contextlib.contextmanager
    def capture_session(self) -> Iterator[Any]:
        pool = self.pools.acquire()  # clean: near miss, only a pool that is not None is released in the finally
        try:
            yield pool
        finally:
            if pool is not None:
                self.pools.release(pool)

    def set_draft(self) -> None:
        if self.draft is None:
            self.draft = self.pools.acquire()  # clean: kept in the field, close releases it

    def set_shadow(self, size: int) -> bool:
        if self.shadow is not None:
            return True
        self.shadow = self.inputs.obtain(size)  # leak: close drops the field without restoring it
        return self.shadow is not None

    def close(self) -> None:
        for size in list(self.graphs):
            self.evict(size)
        if self.draft is not None:
            self.pools.release(self.draft)
            self.draft = None
        self.shadow = None
