"""ZeRO-3 style parameter partitioning: parameters are gathered around use."""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import torch
from torch import nn

logger = logging.getLogger("zero")


class GatherArena:
    """Full-size parameter buffers, kept in buckets of powers of two."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.in_use = 0
        self.cold: Dict[int, List[torch.Tensor]] = {}

    @staticmethod
    def bucket(n: int) -> int:
        return 1 << (n - 1).bit_length()

    def take(self, n: int) -> torch.Tensor:
        b = self.bucket(n)
        if self.in_use + b > self.budget:
            raise RuntimeError(f"gather arena over budget: {self.in_use}+{b}")
        self.in_use += b
        lst = self.cold.get(b)
        return lst.pop() if lst else torch.empty(b)  # clean: handed to the caller

    def return_(self, t: torch.Tensor) -> None:
        self.in_use -= t.numel()
        self.cold.setdefault(t.numel(), []).append(t)


class PartitionedParam:
    def __init__(self, full_shape: Sequence[int], shard: torch.Tensor, arena: GatherArena) -> None:
        self.shape = tuple(full_shape)
        self.shard = shard
        self.arena = arena
        self.full: Optional[torch.Tensor] = None
        self.users = 0

    @property
    def numel(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    def _fill(self, buf: torch.Tensor) -> None:
        reps = -(-self.numel // self.shard.numel())
        buf[: self.numel] = self.shard.repeat(reps)[: self.numel]

    def gather(self) -> torch.Tensor:
        if self.full is None:
            self.full = self.arena.take(self.numel)  # clean: near miss, with the first user; partition() returns it with the last
            self._fill(self.full)
        self.users += 1
        return self.full[: self.numel].view(self.shape)

    def partition(self) -> None:
        self.users -= 1
        if self.users == 0 and self.full is not None:
            self.arena.return_(self.full)
            self.full = None


def gathered(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Methods run with all parameters of the module gathered."""

    @functools.wraps(fn)
    def wrapper(self: "ZeroModule", *args: Any, **kw: Any) -> Any:
        for p in self.pparams.values():
            p.gather()  # clean: partitioned in finally
        try:
            return fn(self, *args, **kw)
        finally:
            for p in self.pparams.values():
                p.partition()

    return wrapper


class ZeroModule(nn.Module):
    def __init__(self, arena: GatherArena) -> None:
        super().__init__()
        self.arena = arena
        self.pparams: Dict[str, PartitionedParam] = {}

    def add_param(self, name: str, shape: Sequence[int], shard: torch.Tensor) -> None:
        self.pparams[name] = PartitionedParam(shape, shard, self.arena)

    @contextmanager
    def use(self, name: str) -> Iterator[torch.Tensor]:
        p = self.pparams[name]
        w = p.gather()  # clean: partitioned in finally
        try:
            yield w
        finally:
            p.partition()

    @gathered
    def param_norms(self) -> Dict[str, float]:
        return {k: float(p.full[: p.numel].norm()) for k, p in self.pparams.items()}


class ZeroLinear(ZeroModule):
    def __init__(self, arena: GatherArena, fin: int, fout: int, world: int = 1) -> None:
        super().__init__(arena)
        self.add_param("weight", (fout, fin), torch.randn(fout * fin // world))
        self.add_param("bias", (fout,), torch.zeros(max(fout // world, 1)))
        self.prefetched: Optional[torch.Tensor] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.use("weight") as w, self.use("bias") as b:  # clean: with statement
            return nn.functional.linear(x, w, b)

    def forward_no_bias(self, x: torch.Tensor) -> torch.Tensor:
        w = self.pparams["weight"].gather()  # leak: an input without rows is returned before partition
        if x.shape[0] == 0:
            return x.new_empty(0, w.shape[0])
        y = x @ w.t()
        self.pparams["weight"].partition()
        return y

    def weight_copy(self) -> torch.Tensor:
        return self.pparams["weight"].gather().clone()  # leak: one user more for each call, never partitioned

    def weight_mean(self) -> float:
        m = float(self.pparams["weight"].gather().mean())  # clean: near miss, the view is dropped, but partition needs only the parameter
        self.pparams["weight"].partition()
        return m

    def prefetch(self) -> None:
        if self.prefetched is None:
            self.prefetched = self.pparams["weight"].gather()  # clean: near miss, guarded, drop_prefetch partitions

    def drop_prefetch(self) -> None:
        if self.prefetched is not None:
            self.prefetched = None
            self.pparams["weight"].partition()

    def half(self) -> "ZeroLinear":
        for name, p in self.pparams.items():
            buf = self.arena.take(p.numel)  # leak: half() gives another tensor, the buffer taken is lost
            p._fill(buf)
            buf = buf[: p.numel].half()
            p.shard = buf[: p.shard.numel()].clone()
        return self

    def requantize(self, levels: int) -> None:
        for name, p in self.pparams.items():
            buf = self.arena.take(p.numel)  # clean: near miss, round_ and clamp_ are in place, returned in each round
            p._fill(buf)
            buf.mul_(levels).round_().clamp_(-levels, levels).div_(levels)
            p.shard.copy_(buf[: p.shard.numel()])
            self.arena.return_(buf)

    def check(self) -> List[str]:
        bad = []
        for name, p in self.pparams.items():
            w = p.gather()  # leak: parameters with nan are noted and skipped while gathered
            if torch.isnan(w).any():
                logger.error("nan in %s", name)
                bad.append(name)
                continue
            p.partition()
        return bad

    def load_full(self, state: Dict[str, torch.Tensor], strict: bool = True) -> None:
        for name, p in self.pparams.items():
            buf = self.arena.take(p.numel)  # leak: a missing key raises KeyError in strict mode with the buffer taken
            if name not in state:
                if strict:
                    raise KeyError(name)
                self.arena.return_(buf)
                continue
            buf[: p.numel].copy_(state[name].flatten())
            p.shard.copy_(buf[: p.shard.numel()])
            self.arena.return_(buf)
