"""Stage-3 partitioned parameters: gathering, reference counts, prefetch and release by submodule."""
from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterable, List, Optional, Set

import torch
import torch.distributed as dist


@dataclass(eq=False)
class ShardedParam:
    pid: int
    shard: torch.Tensor
    full_numel: int
    full: Optional[torch.Tensor] = None
    users: int = 0
    persistent: bool = False


class FullBufferPool:
    """Flat buffers for gathered parameters, under a cap of elements."""

    def __init__(self, max_numel: int):
        self.max_numel = max_numel
        self.in_use = 0
        self._shelf: Dict[int, List[torch.Tensor]] = collections.defaultdict(list)

    def alloc(self, numel: int) -> Optional[torch.Tensor]:
        if self.in_use + numel > self.max_numel:
            return None
        self.in_use += numel
        shelf = self._shelf[numel]
        return shelf.pop() if shelf else torch.empty(numel, device="cuda", dtype=torch.bfloat16)

    def dealloc(self, buf: torch.Tensor) -> None:
        self.in_use -= buf.numel()
        self._shelf[buf.numel()].append(buf)


class Coordinator:
    """Keeps a parameter gathered while it has users."""

    def __init__(self, pool: FullBufferPool, group=None):
        self.pool = pool
        self.group = group
        self._evictable: Deque[ShardedParam] = collections.deque()
        self._by_module: Dict[int, List[ShardedParam]] = {}
        self.stats: Dict[str, int] = collections.Counter()

    def _make_room(self, numel: int) -> torch.Tensor:
        while True:
            buf = self.pool.alloc(numel)  # clean: returned to the caller, or None
            if buf is not None:
                return buf
            if not self._evictable:
                raise RuntimeError("nothing left to evict")
            victim = self._evictable.popleft()
            if victim.users == 0 and victim.full is not None:
                self.pool.dealloc(victim.full)
                victim.full = None
                self.stats["evicted"] += 1

    def pin(self, p: ShardedParam) -> torch.Tensor:
        """One more user of the gathered parameter; unpin takes it back."""
        if p.full is None:
            buf = self._make_room(p.full_numel)  # clean: near miss, in p.full, eviction or drop deallocs it
            dist.all_gather_into_tensor(buf, p.shard, group=self.group)
            p.full = buf
            self.stats["gathered"] += 1
        p.users += 1
        return p.full

    def unpin(self, p: ShardedParam) -> None:
        p.users -= 1
        if p.users == 0 and not p.persistent:
            self._evictable.append(p)

    def drop(self, p: ShardedParam) -> None:
        if p.full is not None and p.users == 0:
            self.pool.dealloc(p.full)
            p.full = None

    def pre_forward(self, module_id: int, params: Iterable[ShardedParam]) -> None:
        held = self._by_module.setdefault(module_id, [])
        for p in params:
            self.pin(p)  # clean: near miss, listed by module, post_forward unpins
            held.append(p)

    def post_forward(self, module_id: int) -> None:
        for p in self._by_module.pop(module_id, []):
            self.unpin(p)

    def norm_of(self, p: ShardedParam) -> float:
        full = self.pin(p)  # leak: the user is never taken back
        value = float(full.float().norm())
        self.stats["norms"] += 1
        return value

    def copy_of(self, p: ShardedParam) -> torch.Tensor:
        full = self.pin(p)  # clean: cloned, then unpinned
        out = full.clone()
        self.unpin(p)
        return out

    def shared_storage(self, a: ShardedParam, b: ShardedParam) -> bool:
        """Whether two tied parameters are equal once gathered."""
        left = self.pin(a)  # clean: unpinned on both ways out
        if a.full_numel != b.full_numel:
            self.unpin(a)
            return False
        right = self.pin(b)  # leak: b keeps its user when the contents are equal
        if torch.equal(left, right):
            self.unpin(a)
            return True
        self.unpin(b)
        self.unpin(a)
        return False

    def refresh(self, params: List[ShardedParam], skip: Set[int]) -> None:
        for p in params:
            full = self.pin(p)  # leak: continue for parameters in skip keeps the user
            if p.pid in skip:
                self.stats["skipped"] += 1
                continue
            start = dist.get_rank(self.group) * p.shard.numel()
            p.shard.copy_(full[start : start + p.shard.numel()])
            self.unpin(p)


@dataclass
class GatheredParams:
    """Full parameters for a block; with `writer`, the shards are updated at its end."""

    coord: Coordinator
    params: List[ShardedParam]
    writer: Optional[int] = None
    enabled: bool = True
    _views: List[torch.Tensor] = field(default_factory=list)

    def __enter__(self) -> List[torch.Tensor]:
        if not self.enabled:
            return [p.shard for p in self.params]
        self._views = [self.coord.pin(p) for p in self.params]  # leak: kept without a writer
        return self._views

    def __exit__(self, *exc) -> None:
        if not self.enabled:
            return
        if self.writer is None:
            self._views = []
            return
        for p, view in zip(self.params, self._views):
            dist.broadcast(view, self.writer, group=self.coord.group)
            start = dist.get_rank(self.coord.group) * p.shard.numel()
            p.shard.copy_(view[start : start + p.shard.numel()])
            self.coord.unpin(p)
        self._views = []


class PinnedScope:
    """As GatheredParams, read only, and with parameters that may be added later."""

    def __init__(self, coord: Coordinator, enabled: bool = True):
        self.coord = coord
        self.enabled = enabled
        self._pinned: List[ShardedParam] = []

    def __enter__(self) -> "PinnedScope":
        return self

    def add(self, p: ShardedParam) -> torch.Tensor:
        if not self.enabled:
            return p.shard
        full = self.coord.pin(p)  # clean: near miss, __exit__ unpins everything that was added
        self._pinned.append(p)
        return full

    def __exit__(self, *exc) -> None:
        if not self._pinned:
            return
        for p in reversed(self._pinned):
            self.coord.unpin(p)
        self._pinned.clear()


def export_state(coord: Coordinator, params: List[ShardedParam], rank0: bool) -> Dict[int, torch.Tensor]:
    state: Dict[int, torch.Tensor] = {}
    with PinnedScope(coord) as scope:  # clean: the scope unpins
        for p in params:
            full = scope.add(p)  # clean: near miss, the scope owns it
            if not rank0:
                continue
            state[p.pid] = full.cpu()
    return state


def export_flat(coord: Coordinator, params: List[ShardedParam]) -> torch.Tensor:
    """Concatenation of all the parameters on the host."""
    total = sum(p.full_numel for p in params)
    staging = coord.pool.alloc(total)  # leak: never deallocated after it was copied to the host
    if staging is None:
        return torch.cat([coord.copy_of(p).cpu() for p in params])
    offset = 0
    for p in params:
        staging[offset : offset + p.full_numel].copy_(coord.pin(p))  # clean: unpinned in the same turn
        offset += p.full_numel
        coord.unpin(p)
    return staging.cpu()
