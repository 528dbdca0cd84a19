"""Bucketed gradient reduction that overlaps with the backward pass.

Gradients are copied into a bucket; a full bucket is reduce-scattered asynchronously. Buckets come from
BucketStore, which keeps a fixed number of them per size class.
"""
from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist


class BucketStore:
    def __init__(self, per_class: int, classes: tuple[int, ...]):
        self.classes = tuple(sorted(classes))
        self._shelf: dict[int, list[torch.Tensor]] = {
            c: [torch.empty(c, device="cuda") for _ in range(per_class)] for c in self.classes
        }
        self.misses = 0

    def _class_of(self, numel: int) -> int:
        for c in self.classes:
            if numel <= c:
                return c
        raise ValueError(f"no bucket class holds {numel} elements")

    def pull(self, numel: int) -> torch.Tensor:
        c = self._class_of(numel)
        if not self._shelf[c]:
            self.misses += 1
            torch.cuda.synchronize()
        return self._shelf[c].pop()

    def push(self, bucket: torch.Tensor) -> None:
        self._shelf[bucket.numel()].append(bucket)

    def pull_like(self, t: torch.Tensor) -> torch.Tensor:
        """A bucket of the size of t with its contents."""
        b = self.pull(t.numel())  # clean: handed to the caller
        b[: t.numel()].copy_(t.reshape(-1))
        return b


class SyncMode(enum.Enum):
    EVERY = "every"
    ACCUMULATE = "accumulate"


@dataclass
class Filling:
    bucket: torch.Tensor
    used: int = 0
    members: list[tuple[torch.nn.Parameter, int, int]] = field(default_factory=list)


@dataclass
class Launched:
    filling: Filling
    work: object
    scratch: torch.Tensor | None = None


class Reducer:
    def __init__(self, store: BucketStore, bucket_numel: int, group, world: int):
        self.store = store
        self.bucket_numel = bucket_numel
        self.group = group
        self.world = world
        self.mode = SyncMode.EVERY
        self.current: Filling | None = None
        self.launched: list[Launched] = []
        self.residual: dict[int, torch.Tensor] = {}

    # -- hooks ---------------------------------------------------------------------------------------------
    def on_grad(self, p: torch.nn.Parameter) -> None:
        if self.mode is SyncMode.ACCUMULATE:
            return
        n = p.grad.numel()
        if self.current is not None and self.current.used + n > self.bucket_numel:
            self.flush()
        if self.current is None:
            bucket = self.store.pull(self.bucket_numel)  # clean: near miss, flush launches, finish pushes
            self.current = Filling(bucket)
        at = self.current.used
        self.current.bucket[at : at + n].copy_(p.grad.reshape(-1))
        self.current.members.append((p, at, n))
        self.current.used += n

    def flush(self) -> None:
        if self.current is None:
            return
        work = dist.all_reduce(self.current.bucket, group=self.group, async_op=True)
        self.launched.append(Launched(self.current, work))
        self.current = None

    def finish(self) -> None:
        self.flush()
        for item in self.launched:
            item.work.wait()
            for p, at, n in item.filling.members:
                p.grad.copy_(item.filling.bucket[at : at + n].view_as(p.grad)).div_(self.world)
            self.store.push(item.filling.bucket)
            if item.scratch is not None:
                self.store.push(item.scratch)
        self.launched.clear()

    # -- compressed and late gradients ---------------------------------------------------------------------
    def launch_compressed(self, p: torch.nn.Parameter, keep: float) -> None:
        n = p.grad.numel()
        bucket = self.store.pull_like(p.grad)  # clean: in Filling, finish pushes it
        scratch = self.store.pull(n)  # clean: near miss, in Launched.scratch, finish pushes it when set
        torch.abs(bucket[:n], out=scratch[:n])
        cut = scratch[:n].kthvalue(max(1, int(n * (1 - keep)))).values
        bucket[:n].masked_fill_(scratch[:n] < cut, 0.0)
        work = dist.all_reduce(bucket, group=self.group, async_op=True)
        self.launched.append(Launched(Filling(bucket, n, [(p, 0, n)]), work, scratch))

    def save_residual(self, p: torch.nn.Parameter, sent: torch.Tensor) -> None:
        r = self.store.pull_like(p.grad)  # leak: the one of the last step is overwritten
        r[: sent.numel()].sub_(sent)
        before = self.residual.get(id(p))
        if before is not None:
            r.add_(before, alpha=0.9)
        self.residual[id(p)] = r

    def add_residual(self, p: torch.nn.Parameter) -> None:
        r = self.residual.get(id(p))
        if r is not None:
            p.grad.add_(r[: p.grad.numel()].view_as(p.grad))

    def drop_residuals(self) -> None:
        for r in self.residual.values():
            self.store.push(r)
        self.residual.clear()


class HierarchicalReducer(Reducer):
    """Reduces within the node first; across nodes only when the accumulation is complete."""

    def __init__(self, *args, node_group=None, **kw):
        super().__init__(*args, **kw)
        self.node_group = node_group
        self.partials: dict[int, torch.Tensor] = {}
        self.tasks: list[functools.partial] = []

    def node_reduce(self, p: torch.nn.Parameter) -> None:
        key = id(p)
        if key in self.partials:
            self.partials[key][: p.grad.numel()].add_(p.grad.reshape(-1))
            return
        self.partials[key] = self.store.pull_like(p.grad)  # leak: cross_node pops it, no push

    def cross_node(self, params: list[torch.nn.Parameter]) -> None:
        for p in params:
            part = self.partials.pop(id(p), None)
            if part is None:
                continue
            dist.all_reduce(part, group=self.group)
            p.grad.copy_(part[: p.grad.numel()].view_as(p.grad))

    def defer(self, p: torch.nn.Parameter) -> None:
        bucket = self.store.pull_like(p.grad)  # clean: near miss, bound in the task that run_tasks calls
        self.tasks.append(functools.partial(self._late, p, bucket))

    def _late(self, p: torch.nn.Parameter, bucket: torch.Tensor) -> None:
        dist.all_reduce(bucket, group=self.group)
        p.grad.copy_(bucket[: p.grad.numel()].view_as(p.grad))
        self.store.push(bucket)

    def run_tasks(self) -> int:
        tasks, self.tasks = self.tasks, []
        for t in tasks:
            t()
        return len(tasks)

    def defer_norm(self, p: torch.nn.Parameter, sink: list[float]) -> None:
        bucket = self.store.pull_like(p.grad)  # leak: the deferred function does not push it
        self.tasks.append(functools.partial(lambda b: sink.append(float(b.norm())), bucket))


def cosine_to_mean(store: BucketStore, p: torch.nn.Parameter, group, world: int) -> float:
    local = store.pull_like(p.grad)  # clean: pushed below
    mean = store.pull_like(p.grad)  # leak: only local is pushed
    n = p.grad.numel()
    dist.all_reduce(mean, group=group)
    mean.div_(world)
    cos = torch.nn.functional.cosine_similarity(local[:n], mean[:n], dim=0)
    store.push(local)
    return float(cos)


def detect_spike(store: BucketStore, params: list[torch.nn.Parameter], limit: float) -> int | None:
    """Index of the first parameter whose gradient exceeds the limit."""
    for i, p in enumerate(params):
        b = store.pull_like(p.grad)  # leak: the return out of the loop leaves the bucket of the found one
        peak = float(b[: p.grad.numel()].abs_().max())
        if peak > limit:
            return i
        store.push(b)
    return None
