"""Unsharding of flat parameters around forward and backward."""
from __future__ import annotations

import contextlib
import enum
import logging
from typing import Any, Dict, Iterator, List, Optional

import torch
import torch.distributed as dist
import torch.nn as nn

logger = logging.getLogger(__name__)


class Strategy(enum.Enum):
    FULL_SHARD = "full"
    SHARD_GRAD_OP = "grad_op"
    NO_SHARD = "none"


class FullParamPool:
    def __init__(self, numel: int, limit: int = 3) -> None:
        self.numel = numel
        self._stack: List[torch.Tensor] = []
        self._out = 0
        self.limit = limit

    def acquire(self) -> torch.Tensor:
        if self._out == self.limit:
            raise RuntimeError("too many unsharded parameters")
        self._out += 1
        return self._stack.pop() if self._stack else torch.empty(self.numel)

    def release(self, t: torch.Tensor) -> None:
        self._out -= 1
        self._stack.append(t)


class FlatHandle:
    def __init__(self, shard: torch.Tensor, world: int, pool: FullParamPool, strategy: Strategy) -> None:
        self.shard = shard
        self.world = world
        self.pool = pool
        self.strategy = strategy
        self.full: Optional[torch.Tensor] = None
        self.grad: Optional[torch.Tensor] = None

    @property
    def uses_sharding(self) -> bool:
        return self.strategy is not Strategy.NO_SHARD

    def unshard(self) -> None:
        if not self.uses_sharding or self.full is not None:
            return
        self.full = self.pool.acquire()  # clean: near miss, reshard gives it back under the same flag
        dist.all_gather_into_tensor(self.full, self.shard)

    def reshard(self) -> None:
        if not self.uses_sharding:
            return
        if self.full is not None:
            self.pool.release(self.full)
            self.full = None

    def prepare_grad(self) -> torch.Tensor:
        self.grad = self.pool.acquire()  # leak: called every step, the buffer of the step before is overwritten
        self.grad.zero_()
        return self.grad

    def reduce_grad(self) -> torch.Tensor:
        assert self.grad is not None
        out = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(out, self.grad)
        return out

    def full_copy(self) -> torch.Tensor:
        tmp = self.pool.acquire()  # clean: near miss, clone leaves and tmp is released
        dist.all_gather_into_tensor(tmp, self.shard)
        out = tmp.clone()
        self.pool.release(tmp)
        return out

    def gathered(self) -> torch.Tensor:
        tmp = self.pool.acquire()  # clean: the caller releases
        dist.all_gather_into_tensor(tmp, self.shard)
        return tmp


class ShardedModule(nn.Module):
    def __init__(self, module: nn.Module, handle: FlatHandle) -> None:
        super().__init__()
        self.module = module
        self.handle = handle

    def forward(self, *args: Any) -> torch.Tensor:
        self.handle.unshard()
        out = self.module(*args)
        if self.handle.strategy is Strategy.FULL_SHARD:
            self.handle.reshard()
        return out

    def post_backward(self) -> None:
        self.handle.reshard()

    @contextlib.contextmanager
    def summon(self, writeback: bool = False) -> Iterator[torch.Tensor]:
        full = self.handle.gathered()  # clean: finally
        try:
            yield full
            if writeback:
                self.handle.shard.copy_(full.chunk(self.handle.world)[0])
        finally:
            self.handle.pool.release(full)

    def param_norm(self) -> float:
        with self.summon() as full:  # clean: with block
            return float(full.norm())

    def state_dict_full(self) -> Dict[str, torch.Tensor]:
        full = self.handle.gathered()  # leak: copied to the host and dropped
        return {"flat": full.cpu().clone()}

    def clip(self, max_norm: float) -> float:
        full = self.handle.gathered()  # leak: a norm in bounds returns before the release
        norm = float(full.norm())
        if norm <= max_norm:
            return norm
        full.mul_(max_norm / norm)
        self.handle.shard.copy_(full.chunk(self.handle.world)[0])
        self.handle.pool.release(full)
        return max_norm

    def scale_(self, factor: float) -> None:
        full = self.handle.gathered()  # clean: near miss, augmented in-place product, then released
        full *= factor
        self.handle.shard.copy_(full.chunk(self.handle.world)[0])
        self.handle.pool.release(full)

    def ema(self, other: torch.Tensor, decay: float) -> None:
        full = self.handle.gathered()  # leak: lerp without underscore makes a new tensor, the gathered one is lost
        full = full.lerp(other, 1 - decay)
        self.handle.shard.copy_(full.chunk(self.handle.world)[0])

    def ema_(self, other: torch.Tensor, decay: float) -> None:
        full = self.handle.gathered()  # clean: near miss, lerp_ works in place and gives the same tensor
        full = full.lerp_(other, 1 - decay)
        self.handle.shard.copy_(full.chunk(self.handle.world)[0])
        self.handle.pool.release(full)
