from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Lease:
    arena: "FlatArena"
    start: int
    numel: int

    @property
    def tensor(self) -> Tensor:
        return self.arena.flat[self.start : self.start + self.numel]

    def free(self) -> None:
        self.arena._return(self)


class FlatArena:
    def __init__(self, numel: int, dtype: torch.dtype, device: str = "cuda"):
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._holes: list[tuple[int, int]] = [(0, numel)]

    def lease(self, numel: int) -> Optional[Lease]:
        for i, (start, size) in enumerate(self._holes):
            if size >= numel:
                if size == numel:
                    del self._holes[i]
                else:
                    self._holes[i] = (start + numel, size - numel)
                return Lease(self, start, numel)
        return None

    def _return(self, lease: Lease) -> None:
        self._holes.append((lease.start, lease.numel))
        self._holes.sort()
        merged: list[tuple[int, int]] = []
        for start, size in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._holes = merged

    @contextmanager
    def scratch(self, numel: int) -> Iterator[Optional[Tensor]]:
        lease = self.lease(numel)  # clean: near miss, freed in the finally unless there was nothing to lease
        try:
            yield lease.tensor if lease is not None else None
        finally:
            if lease is not None:
                lease.free()


@dataclass
class Bucket:
    lease: Lease
    params: list[nn.Parameter]
    pending: int = 0
    work: Optional[dist.Work] = None
    residual: Optional[Lease] = None


@dataclass
class StepReport:
    reduced: int = 0
    skipped: int = 0
    norms: list[float] = field(default_factory=list)


class GradBucketer:
    def __init__(self, arena: FlatArena, group: Optional[dist.ProcessGroup] = None, compress: bool = False):
        self.arena = arena
        self.group = group
        self.compress = compress
        self.world = dist.get_world_size(group)
        self._buckets: list[Bucket] = []
        self._inflight: dict[int, Bucket] = {}

    def build(self, groups: list[list[nn.Parameter]]) -> bool:
        for params in groups:
            numel = sum(p.numel() for p in params)
            lease = self.arena.lease(numel)  # clean: near miss, a failed build tears down every bucket so far
            if lease is None:
                self.teardown()
                return False
            self._buckets.append(Bucket(lease, params, pending=len(params)))
        return True

    def attach_residuals(self) -> bool:
        for bucket in self._buckets:
            if bucket.residual is not None:
                continue
            bucket.residual = self.arena.lease(bucket.lease.numel)  # leak: teardown() frees only the bucket's main lease
            if bucket.residual is None:
                return False
            bucket.residual.tensor.zero_()
        return True

    def launch(self, index: int) -> None:
        bucket = self._buckets[index]
        torch.cat([p.grad.view(-1) for p in bucket.params], out=bucket.lease.tensor)
        bucket.work = dist.all_reduce(bucket.lease.tensor, group=self.group, async_op=True)
        self._inflight[index] = bucket

    def wait(self, report: StepReport) -> None:
        for bucket in self._inflight.values():
            bucket.work.wait()
            bucket.work = None
            bucket.lease.tensor.div_(self.world)
            report.reduced += 1
        self._inflight.clear()

    def reduce_sparse(self, index: int, top_k: int) -> Optional[Tensor]:
        bucket = self._buckets[index]
        values = self.arena.lease(top_k)  # clean: near miss, the failing second lease gives this one back
        if values is None:
            return None
        gathered = self.arena.lease(top_k * self.world)  # leak: top_k beyond the threshold returns the dense tensor with gathered held
        if gathered is None:
            values.free()
            return None
        torch.topk(bucket.lease.tensor.abs(), top_k, out=(values.tensor, torch.empty(top_k, dtype=torch.long, device="cuda")))
        if top_k * 4 > bucket.lease.numel:
            values.free()
            return bucket.lease.tensor
        dist.all_gather_into_tensor(gathered.tensor, values.tensor, group=self.group)
        out = gathered.tensor.view(self.world, top_k).sum(0)
        values.free()
        gathered.free()
        return out

    def grad_norm(self, report: StepReport) -> float:
        with self.arena.scratch(len(self._buckets)) as norms:  # clean: the with block gives it back
            if norms is None:
                return float("nan")
            for i, bucket in enumerate(self._buckets):
                norms[i] = bucket.lease.tensor.norm()
            total = float(norms.norm())
        report.norms.append(total)
        return total

    def snapshot(self) -> list[Lease]:
        copies: list[Lease] = []
        for bucket in self._buckets:
            copy = self.arena.lease(bucket.lease.numel)  # leak: a full arena returns an empty list and the copies so far are dropped
            if copy is None:
                return []
            copy.tensor.copy_(bucket.lease.tensor)
            copies.append(copy)
        return copies

    def restore(self, copies: list[Lease]) -> None:
        for bucket, copy in zip(self._buckets, copies):
            bucket.lease.tensor.copy_(copy.tensor)
            copy.free()

    def teardown(self) -> None:
        for bucket in self._buckets:
            bucket.lease.free()
        self._buckets.clear()
        self._inflight.clear()


class MixedPrecisionStep:
    def __init__(self, bucketer: GradBucketer, opt: torch.optim.Optimizer, scale: float = 2.0**16):
        self.bucketer = bucketer
        self.opt = opt
        self.scale = scale
        self.skipped_in_row = 0

    def step(self, report: StepReport) -> bool:
        saved = self.bucketer.snapshot()  # leak: the good step returns True and the snapshot is never freed
        self.bucketer.wait(report)
        norm = self.bucketer.grad_norm(report)
        if norm != norm or norm == float("inf"):
            self.bucketer.restore(saved)
            self.scale *= 0.5
            self.skipped_in_row += 1
            report.skipped += 1
            return False
        self.opt.step()
        self.skipped_in_row = 0
        return True

    def trial_step(self, report: StepReport, tolerance: float) -> bool:
        saved = self.bucketer.snapshot()  # clean: near miss, restore frees on one way and the loop on the other
        self.bucketer.wait(report)
        if self.bucketer.grad_norm(report) > tolerance:
            self.bucketer.restore(saved)
            return False
        for lease in saved:
            lease.free()
        self.opt.step()
        return True

    def flat_master(self, numel: int) -> Tensor:
        lease = self.bucketer.arena.lease(numel)  # leak: the clone goes out and the lease is forgotten
        if lease is None:
            return torch.empty(numel, dtype=torch.float32, device="cuda")
        lease.tensor.zero_()
        return lease.tensor.float().clone()

    def unscale(self, index: int) -> None:
        bucket = self.bucketer._buckets[index]
        tmp = self.bucketer.arena.lease(bucket.lease.numel)  # clean: near miss, the guard around free is the same None test
        if tmp is not None:
            torch.mul(bucket.lease.tensor, 1.0 / self.scale, out=tmp.tensor)
            bucket.lease.tensor.copy_(tmp.tensor)
        else:
            bucket.lease.tensor.mul_(1.0 / self.scale)
        if tmp is not None:
            tmp.free()
