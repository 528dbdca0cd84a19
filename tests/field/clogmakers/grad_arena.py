"""Scratch memory for gradient reduction.

Gradients are packed into regions of one flat arena, reduced over the data parallel group and
scattered back.  Regions are contiguous, the free list is a sorted list of holes.
"""
from __future__ import annotations

import bisect
import contextlib
import logging
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterable, List, Optional, Tuple

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

GRANULE = 256


class ArenaFull(MemoryError):
    pass


@dataclass(eq=False)
class Region:
    arena: "Arena"
    offset: int
    numel: int
    live: bool = True

    @property
    def tensor(self) -> torch.Tensor:
        return self.arena.flat[self.offset : self.offset + self.numel]

    def free(self) -> None:
        if self.live:
            self.live = False
            self.arena.put(self.offset, self.numel)


@dataclass
class Arena:
    flat: torch.Tensor
    holes: List[Tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.holes:
            self.holes = [(0, self.flat.numel())]

    def take(self, numel: int) -> Region:
        for i, (_, size) in enumerate(self.holes):
            if size < numel:
                continue
            offset, size = self.holes.pop(i)  # leak: a rest below the granule is neither part of the region nor a hole again
            if size - numel >= GRANULE:
                self.holes.insert(i, (offset + numel, size - numel))
            return Region(self, offset, numel)
        raise ArenaFull(f"{numel} elements, largest hole {max((s for _, s in self.holes), default=0)}")

    def take_last(self, numel: int) -> Optional[Region]:
        """From the end of the last hole, for things that live long."""
        if not self.holes or self.holes[-1][1] < numel:
            return None
        offset, size = self.holes.pop()  # clean: near miss, all but the end that is handed out is put back as a hole
        if size > numel:
            self.holes.append((offset, size - numel))
        return Region(self, offset + size - numel, numel)

    def put(self, offset: int, numel: int) -> None:
        i = bisect.bisect(self.holes, (offset, numel))
        self.holes.insert(i, (offset, numel))
        if i + 1 < len(self.holes) and offset + numel == self.holes[i + 1][0]:
            self.holes[i : i + 2] = [(offset, numel + self.holes[i + 1][1])]
        if i > 0 and sum(self.holes[i - 1]) == self.holes[i][0]:
            prev = self.holes[i - 1]
            self.holes[i - 1 : i + 1] = [(prev[0], prev[1] + self.holes[i][1])]

    @contextlib.contextmanager
    def scratch(self, numel: int):
        region = self.take(numel)  # clean: freed in finally
        try:
            yield region.tensor
        finally:
            region.free()


def pack(params: Iterable[torch.nn.Parameter], out: torch.Tensor) -> None:
    pos = 0
    for p in params:
        n = p.numel()
        out[pos : pos + n].copy_(p.grad.reshape(-1))
        pos += n


def unpack(params: Iterable[torch.nn.Parameter], src: torch.Tensor) -> None:
    pos = 0
    for p in params:
        n = p.numel()
        p.grad.copy_(src[pos : pos + n].view_as(p))
        pos += n


@dataclass
class Inflight:
    params: List[torch.nn.Parameter]
    region: Region
    work: "dist.Work"

    def land(self) -> bool:
        """Waits, scatters and frees.  False if the result is not finite."""
        self.work.wait()
        ok = bool(torch.isfinite(self.region.tensor).all())
        if ok:
            unpack(self.params, self.region.tensor)
        self.region.free()
        return ok


class Reducer:
    def __init__(self, arena: Arena, group=None, bucket_numel: int = 1 << 22) -> None:
        self.arena = arena
        self.group = group
        self.bucket_numel = bucket_numel
        self.inflight: List[Inflight] = []
        self.pending: List[torch.nn.Parameter] = []
        self.residuals: Dict[str, Region] = {}
        self.skipped_steps = 0
        self._handles: List = []

    def attach(self, module: torch.nn.Module) -> None:
        for p in module.parameters():
            if p.requires_grad:
                self._handles.append(p.register_post_accumulate_grad_hook(self._on_grad))  # clean: detach() removes all handles

    def _on_grad(self, param: torch.nn.Parameter) -> None:
        self.pending.append(param)
        if sum(p.numel() for p in self.pending) >= self.bucket_numel:
            self.flush()

    def flush(self) -> None:
        if not self.pending:
            return
        params, self.pending = self.pending, []
        numel = sum(p.numel() for p in params)
        try:
            region = self.arena.take(numel)  # leak: finish() stops at the first overflow and clears the buckets behind it
        except ArenaFull:
            logger.warning("arena is full, %d parameters are reduced one by one", len(params))
            for p in params:
                dist.all_reduce(p.grad, group=self.group)
            return
        pack(params, region.tensor)
        work = dist.all_reduce(region.tensor, group=self.group, async_op=True)
        self.inflight.append(Inflight(params, region, work))

    def finish(self) -> bool:
        self.flush()
        for item in self.inflight:
            if not item.land():
                self.skipped_steps += 1
                self.inflight.clear()
                return False
        self.inflight.clear()
        return True

    def reduce_scatter(self, params: List[torch.nn.Parameter], shard: torch.Tensor) -> None:
        world = dist.get_world_size(self.group)
        try:
            send = self.arena.take(shard.numel() * world)  # leak: when the second take is refused, the fallback does not know of it
            recv = self.arena.take(shard.numel())  # clean: freed below, nothing follows it that is caught
        except ArenaFull:
            for p in params:
                dist.all_reduce(p.grad, group=self.group)
            return
        pack(params, send.tensor)
        dist.reduce_scatter_tensor(recv.tensor, send.tensor, group=self.group)
        shard.copy_(recv.tensor)
        recv.free()
        send.free()

    def broadcast(self, params: List[torch.nn.Parameter], src: int) -> None:
        region = self.arena.take(sum(p.numel() for p in params))  # clean: both arms free it
        if dist.get_rank(self.group) == src:
            pack(params, region.tensor)
            dist.broadcast(region.tensor, src, group=self.group)
            region.free()
            return
        dist.broadcast(region.tensor, src, group=self.group)
        unpack(params, region.tensor)
        region.free()

    def norm(self, params: List[torch.nn.Parameter]) -> float:
        with self.arena.scratch(len(params)) as out:  # clean: context manager
            for i, p in enumerate(params):
                out[i] = p.grad.norm()
            if not torch.isfinite(out).all():
                return float("inf")
            return float(out.norm())

    def track_residual(self, name: str, numel: int) -> None:
        """Error feedback of the compressed reduction, one region for every parameter."""
        region = self.arena.take_last(numel)  # leak: after resharding the old region of the name is overwritten
        if region is None:
            logger.info("no room for the residual of %s", name)
            return
        region.tensor.zero_()
        self.residuals[name] = region

    def reshard(self, numels: Dict[str, int]) -> None:
        for name, numel in numels.items():
            old = self.residuals.get(name)
            if old is not None and old.numel == numel:
                continue
            self.track_residual(name, numel)

    def detach(self) -> None:
        for h in self._handles:
            h.remove()
        self._handles.clear()
        for region in self.residuals.values():
            region.free()
        self.residuals.clear()


class MasterCopy:
    """A high precision copy of some parameters, held from begin() to end() of an update."""

    def __init__(self, arena: Arena, params: List[torch.nn.Parameter]) -> None:
        self.arena = arena
        self.params = params
        self.region: Optional[Region] = None
        self.dirty = False

    def begin(self) -> torch.Tensor:
        if self.region is None:
            self.region = self.arena.take(sum(p.numel() for p in self.params))  # leak: end() without mark() returns before free, then drop() forgets it
        pack(self.params, self.region.tensor)
        return self.region.tensor

    def mark(self) -> None:
        self.dirty = True

    def end(self) -> None:
        if not self.dirty:
            return
        unpack(self.params, self.region.tensor)
        self.dirty = False
        self.region.free()
        self.region = None

    def drop(self) -> None:
        self.params = []
        self.region = None


class MomentPair:
    def __init__(self, arena: Arena, numel: int) -> None:
        self.first = arena.take(numel)  # clean: near miss, freed below when there is no second and by close() later
        try:
            self.second = arena.take(numel)  # clean: freed by close()
        except ArenaFull:
            self.first.free()
            raise

    def close(self) -> None:
        for region in (self.first, self.second):
            region.free()


def with_moments(arena: Arena, numel: int, fn: Callable[[MomentPair], None]) -> None:
    pair = MomentPair(arena, numel)  # clean: closed in finally
    try:
        fn(pair)
    finally:
        pair.close()
