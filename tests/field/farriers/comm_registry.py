# Reference-counted communicators.  Creating an NCCL communicator costs seconds and device memory,
# hence layers that want the same rank set get the same one.
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist


class Comm:
    def __init__(self, key: tuple[int, ...], pg: Any) -> None:
        self.key = key
        self.pg = pg
        self.nref = 0


class CommRegistry:
    def __init__(self, backend: str = "nccl", limit: int = 64) -> None:
        self.backend = backend
        self.limit = limit
        self._tab: dict[tuple[int, ...], Comm] = {}
        self._mu = threading.RLock()

    def acquire(self, ranks: Sequence[int]) -> Comm | None:
        key = tuple(sorted(ranks))
        with self._mu:
            c = self._tab.get(key)
            if c is None:
                if len(self._tab) >= self.limit:
                    return None
                c = self._tab[key] = Comm(key, dist.new_group(list(key), backend=self.backend))
            c.nref += 1
            return c

    def release(self, c: Comm) -> None:
        with self._mu:
            c.nref -= 1
            if c.nref == 0:
                del self._tab[c.key]
                dist.destroy_process_group(c.pg)

    @contextlib.contextmanager
    def using(self, ranks: Sequence[int]) -> Iterator[Comm | None]:
        c = self.acquire(ranks)  # clean: near miss, the finally releases it whenever there is one
        try:
            yield c
        finally:
            if c is not None:
                self.release(c)


REGISTRY = CommRegistry()


class ParallelDims:
    """tp x cp x pp mesh; row-major ranks."""

    def __init__(self, rank: int, tp: int, cp: int, pp: int) -> None:
        self.rank, self.tp, self.cp, self.pp = rank, tp, cp, pp
        self.tp_comm: Comm | None = None
        self.cp_comm: Comm | None = None
        self.pp_comm: Comm | None = None
        self.embd_comm: Comm | None = None

    def _ranks(self, size: int, stride: int) -> list[int]:
        base = self.rank - (self.rank // stride % size) * stride
        return [base + i * stride for i in range(size)]

    def build(self) -> bool:
        if self.tp > 1:
            self.tp_comm = REGISTRY.acquire(self._ranks(self.tp, 1))  # clean: near miss, the failing branches and teardown both release it
            if self.tp_comm is None:
                return False
        if self.cp > 1:
            self.cp_comm = REGISTRY.acquire(self._ranks(self.cp, self.tp))  # clean: near miss, teardown covers it and so does the failing branch
            if self.cp_comm is None:
                self.teardown()
                return False
        if self.pp > 1:
            self.pp_comm = REGISTRY.acquire(self._ranks(self.pp, self.tp * self.cp))  # clean: near miss, released by teardown
            if self.pp_comm is None:
                self.teardown()
                return False
            ends = self._ranks(self.pp, self.tp * self.cp)
            if self.rank in (ends[0], ends[-1]):
                self.embd_comm = REGISTRY.acquire([ends[0], ends[-1]])  # leak: teardown knows tp, cp and pp but not the embedding group
        return True

    def teardown(self) -> None:
        for name in ("tp_comm", "cp_comm", "pp_comm"):
            c = getattr(self, name)
            if c is not None:
                REGISTRY.release(c)
                setattr(self, name, None)


class SequenceParallelLinear(torch.nn.Module):
    def __init__(self, inp: int, out: int, ranks: Sequence[int]) -> None:
        super().__init__()
        self.comm = REGISTRY.acquire(ranks)  # clean: near miss, owned by the module and released in shutdown
        world = len(ranks) if self.comm is not None else 1
        self.weight = torch.nn.Parameter(torch.empty(out // world, inp))

    def regroup(self, ranks: Sequence[int]) -> None:
        if self.comm is not None and tuple(sorted(ranks)) == self.comm.key:
            return
        self.comm = REGISTRY.acquire(ranks)  # leak: the reference on the old rank set is overwritten

    def regroup_subset(self, ranks: Sequence[int]) -> bool:
        new = REGISTRY.acquire(ranks)  # clean: near miss, taken before the old one is let go and then owned by the module
        if new is None:
            return False
        if self.comm is not None:
            REGISTRY.release(self.comm)
        self.comm = new
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.t()
        if self.comm is None:
            return y
        parts = [torch.empty_like(y) for _ in self.comm.key]
        dist.all_gather(parts, y, group=self.comm.pg)
        return torch.cat(parts, dim=-1)

    def shutdown(self) -> None:
        if self.comm is not None:
            REGISTRY.release(self.comm)
            self.comm = None


def global_grad_norm(params: list[torch.Tensor], ranks: Sequence[int]) -> float:
    c = REGISTRY.acquire(ranks)  # leak: ranks whose norm is infinite return before the release
    sq = sum((p.grad.float().pow(2).sum() for p in params if p.grad is not None), torch.zeros(()))
    if c is None:
        return float(sq.sqrt())
    dist.all_reduce(sq, group=c.pg)
    if torch.isinf(sq):
        return float("inf")
    REGISTRY.release(c)
    return float(sq.sqrt())


def broadcast_metrics(metrics: dict[str, float], ranks: Sequence[int]) -> dict[str, float]:
    with REGISTRY.using(ranks) as c:  # clean: near miss, the early return leaves through the with block
        if c is None or not metrics:
            return metrics
        t = torch.tensor([metrics[k] for k in sorted(metrics)])
        dist.broadcast(t, src=c.key[0], group=c.pg)
        return dict(zip(sorted(metrics), t.tolist()))


def probe_subgroups(groups: list[list[int]], bytes_: int) -> dict[tuple[int, ...], bool]:
    ok: dict[tuple[int, ...], bool] = {}
    for ranks in groups:
        c = REGISTRY.acquire(ranks)  # leak: the handler for a failing collective continues without a release
        if c is None:
            break
        try:
            dist.all_reduce(torch.ones(bytes_ // 4), group=c.pg)
        except RuntimeError:
            ok[c.key] = False
            continue
        ok[c.key] = True
        REGISTRY.release(c)
    return ok


def expert_groups(world: int, ep: int) -> list[Comm]:
    out: list[Comm] = []
    for lo in range(0, world, ep):
        c = REGISTRY.acquire(range(lo, lo + ep))  # clean: near miss, the shortage branch releases those already gathered
        if c is None:
            for d in out:
                REGISTRY.release(d)
            return []
        out.append(c)
    return out


def sync_expert_grads(grads: list[torch.Tensor], world: int, ep: int) -> int:
    comms = expert_groups(world, ep)  # leak: only the groups that matched a gradient are released
    for g, c in zip(grads, comms):
        dist.all_reduce(g, group=c.pg)
        REGISTRY.release(c)
    return min(len(grads), len(comms))
