"""Parameter partitioning (stage 3): gather before use, release after."""
import itertools
import logging
from contextlib import contextmanager
from enum import Enum
from typing import Any, Dict, Iterable, List, Optional, Set

import torch
from torch import nn

logger = logging.getLogger(__name__)


class PState(Enum):
    SHARDED = 0
    INFLIGHT = 1
    FULL = 2


class GatherBufferPool:
    """Contiguous full-parameter buffers, best fit."""

    def __init__(self, sizes: Iterable[int], dtype=torch.bfloat16):
        self._free = sorted((torch.empty(s, dtype=dtype) for s in sizes), key=lambda t: t.numel())

    def get(self, numel: int) -> torch.Tensor:
        for i, t in enumerate(self._free):
            if t.numel() >= numel:
                return self._free.pop(i)
        raise RuntimeError(f"no gather buffer for {numel} elements")

    def put(self, t: torch.Tensor) -> None:
        self._free.append(t)
        self._free.sort(key=lambda x: x.numel())


class ShardedParam:
    def __init__(self, p: nn.Parameter, world: int):
        self.shape = p.shape
        self.numel = p.numel()
        self.shard = p.detach().flatten()[: self.numel // world].clone()
        self.full: Optional[torch.Tensor] = None
        self.state = PState.SHARDED
        self.active: Set[int] = set()
        self.persistent = self.numel < 1024


class PartitionCoordinator:
    def __init__(self, pool: GatherBufferPool, group=None):
        self.pool = pool
        self.group = group
        self.prefetched: List[ShardedParam] = []
        self.reuse: Dict[int, torch.Tensor] = {}

    def _gather_into(self, sp: ShardedParam) -> torch.Tensor:
        buf = self.pool.get(sp.numel)  # clean: handed to the caller
        torch.distributed.all_gather_into_tensor(buf[: sp.numel], sp.shard, group=self.group)
        return buf

    def fetch(self, sp: ShardedParam, module_id: int) -> torch.Tensor:
        sp.active.add(module_id)
        if sp.full is None:
            sp.full = self._gather_into(sp)  # clean: near miss, gathered once, release() puts it back with the last user
            sp.state = PState.FULL
        return sp.full[: sp.numel].view(sp.shape)

    def release(self, sp: ShardedParam, module_id: int) -> None:
        sp.active.discard(module_id)
        if not sp.active and sp.full is not None:
            self.pool.put(sp.full)
            sp.full = None
            sp.state = PState.SHARDED

    @contextmanager
    def gathered(self, params: List[ShardedParam], module_id: int):
        views = [self.fetch(p, module_id) for p in params]  # clean: released in finally
        try:
            yield views
        finally:
            for p in params:
                self.release(p, module_id)

    def norm(self, params: List[ShardedParam]) -> float:
        total = 0.0
        for i, sp in enumerate(params):
            w = self.fetch(sp, -1)  # leak: infinite norms return before release
            n = float(w.norm())
            if n == float("inf"):
                logger.warning("parameter %d has an infinite norm", i)
                return n
            total += n * n
            self.release(sp, -1)
        return total ** 0.5

    def export(self, params: Dict[str, ShardedParam]) -> Dict[str, torch.Tensor]:
        out = {}
        for name, sp in params.items():
            w = self.fetch(sp, -2)  # clean: near miss, released before the continue as well
            if sp.persistent:
                self.release(sp, -2)
                continue
            out[name] = w.clone()
            self.release(sp, -2)
        return out

    def broadcast_full(self, sp: ShardedParam) -> torch.Tensor:
        buf = self._gather_into(sp)  # leak: cast to float32 under the same name
        buf = buf[: sp.numel].float()
        return buf.view(sp.shape)

    def trace(self, params: List[ShardedParam]) -> torch.Tensor:
        buf = self._gather_into(params[0])  # clean: near miss, the chain of views ends in a clone, buf goes back
        diag = buf[: params[0].numel].view(params[0].shape).diagonal()
        out = diag.clone()
        self.pool.put(buf)
        return out

    def warm_reuse(self, sp: ShardedParam) -> None:
        key = id(sp)
        buf = self._gather_into(sp)  # leak: a key known already keeps the old buffer and drops this one
        self.reuse.setdefault(key, buf)

    def clear_reuse(self) -> None:
        for key in list(self.reuse):
            self.pool.put(self.reuse.pop(key))

    def compare(self, a: ShardedParam, b: ShardedParam) -> bool:
        ba = self._gather_into(a)  # clean: put back in both branches
        bb = self._gather_into(b)  # leak: put back only where the sizes agree
        if a.numel != b.numel:
            self.pool.put(ba)
            return False
        same = torch.equal(ba[: a.numel], bb[: b.numel])
        self.pool.put(ba)
        self.pool.put(bb)
        return same


def forward_layer(coord: PartitionCoordinator, layer: nn.Module, params: List[ShardedParam], x: Any) -> Any:
    with coord.gathered(params, id(layer)) as views:  # clean: with block
        for p, v in zip(layer.parameters(), views):
            p.data = v
        return layer(x)


def max_weight(coord: PartitionCoordinator, params: List[ShardedParam]) -> float:
    return max(float(coord.fetch(p, 7).max()) for p in params)  # leak: fetched inside the expression, never released


def step_pairs(coord: PartitionCoordinator, params: List[ShardedParam]) -> int:
    n = 0
    for a, b in itertools.pairwise(params):
        wa = coord.fetch(a, 9)  # clean: released in finally
        wb = coord.fetch(b, 9)  # clean: near miss, continue leaves through finally
        try:
            if wa.shape != wb.shape:
                continue
            n += int(torch.allclose(wa, wb))
        finally:
            coord.release(a, 9)
            coord.release(b, 9)
    return n
