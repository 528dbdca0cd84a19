from __future__ import annotations

import bisect
import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

log = logging.getLogger("fsdp")


class ArenaFull(RuntimeError):
    pass


@dataclass(frozen=True, order=True)
class Span:
    start: int
    numel: int


class FlatArena:
    """First-fit arena for gathered flat parameters."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty(numel, dtype=dtype, device=device)
        self._holes: List[Span] = [Span(0, numel)]

    def carve(self, numel: int) -> Span:
        for i, hole in enumerate(self._holes):
            if hole.numel < numel:
                continue
            if hole.numel == numel:
                del self._holes[i]
            else:
                self._holes[i] = Span(hole.start + numel, hole.numel - numel)
            return Span(hole.start, numel)
        raise ArenaFull(f"no hole of {numel} elements")

    def restore(self, span: Span) -> None:
        bisect.insort(self._holes, span)
        merged: List[Span] = []
        for hole in self._holes:
            if merged and merged[-1].start + merged[-1].numel == hole.start:
                merged[-1] = Span(merged[-1].start, merged[-1].numel + hole.numel)
            else:
                merged.append(hole)
        self._holes = merged

    def tensor(self, span: Span) -> torch.Tensor:
        return self.data[span.start : span.start + span.numel]


@dataclass
class ShardedUnit:
    name: str
    shard: torch.Tensor
    world: int
    full: Optional[Span] = None
    grad: Optional[Span] = None
    keep_after_forward: bool = False

    @property
    def full_numel(self) -> int:
        return self.shard.numel() * self.world


@dataclass
class UnitManager:
    arena: FlatArena
    group: dist.ProcessGroup
    units: List[ShardedUnit]
    prefetched: Dict[str, Span] = field(default_factory=dict)
    scratch: List[Span] = field(default_factory=list)

    def _gather(self, unit: ShardedUnit) -> Span:
        span = self.arena.carve(unit.full_numel)  # clean: handed on to the caller
        dist.all_gather_into_tensor(self.arena.tensor(span), unit.shard, group=self.group)
        return span

    def unshard(self, unit: ShardedUnit) -> torch.Tensor:
        if unit.full is None:
            span = self.prefetched.pop(unit.name, None)
            if span is None:
                span = self._gather(unit)  # clean: near miss, kept in the unit until reshard
            unit.full = span
        return self.arena.tensor(unit.full)

    def reshard(self, unit: ShardedUnit) -> None:
        if unit.full is not None:
            self.arena.restore(unit.full)
            unit.full = None

    def prefetch(self, order: Sequence[ShardedUnit], position: int, depth: int) -> int:
        issued = 0
        for unit in order[position + 1 : position + 1 + depth]:
            if unit.full is not None:
                continue
            try:
                self.prefetched[unit.name] = self._gather(unit)  # leak: a unit prefetched but not yet used is gathered again over its own entry
            except ArenaFull:
                break
            issued += 1
        return issued

    def prefetch_backward(self, order: Sequence[ShardedUnit], position: int) -> bool:
        unit = order[position - 1] if position else None
        if unit is None or unit.full is not None or unit.name in self.prefetched:
            return False
        self.prefetched[unit.name] = self._gather(unit)  # clean: near miss, the guard above excludes a held entry and unshard takes it over
        return True

    def forward(self, unit: ShardedUnit, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        flat = self.unshard(unit)  # clean: kept on purpose until backward or given back here
        y = torch.func.functional_call(module, {"weight": flat.view(-1, x.shape[-1])}, (x,))
        if not unit.keep_after_forward:
            self.reshard(unit)
        return y

    def backward(self, unit: ShardedUnit, grads: torch.Tensor, sync: bool) -> Optional[torch.Tensor]:
        self.unshard(unit)  # clean: near miss, both ways end in reshard
        if unit.grad is None:
            unit.grad = self.arena.carve(unit.full_numel)  # clean: near miss, kept over accumulation steps and restored at the synchronising one
            self.arena.tensor(unit.grad).zero_()
        self.arena.tensor(unit.grad).add_(grads)
        self.reshard(unit)
        if not sync:
            return None
        out = torch.empty_like(unit.shard)
        dist.reduce_scatter_tensor(out, self.arena.tensor(unit.grad), group=self.group)
        self.arena.restore(unit.grad)
        unit.grad = None
        return out

    def load_full(self, state: Dict[str, torch.Tensor]) -> List[str]:
        missing: List[str] = []
        for unit in self.units:
            span = self.arena.carve(unit.full_numel)  # leak: units absent from the state continue with the span
            value = state.get(unit.name)
            if value is None:
                missing.append(unit.name)
                continue
            self.arena.tensor(span).copy_(value.flatten())
            rank = dist.get_rank(self.group)
            unit.shard.copy_(self.arena.tensor(span).chunk(unit.world)[rank])
            self.arena.restore(span)
        return missing

    def swap_pair(self, a: ShardedUnit, b: ShardedUnit) -> bool:
        left = self._gather(a)  # leak: the handled exhaustion of the second gather loses it
        try:
            right = self._gather(b)  # clean: given back below
        except ArenaFull:
            log.warning("cannot tie %s and %s", a.name, b.name)
            return False
        mean = (self.arena.tensor(left) + self.arena.tensor(right)) / 2
        rank = dist.get_rank(self.group)
        a.shard.copy_(mean.chunk(a.world)[rank])
        b.shard.copy_(mean.chunk(b.world)[rank])
        self.arena.restore(right)
        self.arena.restore(left)
        return True

    def norms(self, names: Sequence[str]) -> Tuple[List[float], int]:
        held: List[Tuple[str, Span]] = []
        for unit in self.units:
            if unit.name in names:
                try:
                    held.append((unit.name, self._gather(unit)))  # clean: near miss, everything gathered before exhaustion is restored after the loop
                except ArenaFull:
                    break
        result = [self.arena.tensor(span).norm().item() for _, span in held]
        for _, span in held:
            self.arena.restore(span)
        return result, len(names) - len(held)

    def borrow_scratch(self, numel: int) -> torch.Tensor:
        span = self.arena.carve(numel)  # clean: near miss, listed in scratch and restored at the end of the step
        self.scratch.append(span)
        return self.arena.tensor(span)

    @contextmanager
    def summon(self, unit: ShardedUnit, writeback: bool) -> Iterator[torch.Tensor]:
        span = self._gather(unit)  # leak: without writeback the generator ends before the restore
        yield self.arena.tensor(span)
        if not writeback:
            return
        unit.shard.copy_(self.arena.tensor(span).chunk(unit.world)[dist.get_rank(self.group)])
        self.arena.restore(span)

    def end_step(self) -> None:
        for span in self.scratch:
            self.arena.restore(span)
        self.scratch.clear()
        for unit in self.units:
            self.reshard(unit)
        for name in list(self.prefetched):
            self.arena.restore(self.prefetched.pop(name))
