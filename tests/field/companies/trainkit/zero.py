from __future__ import annotations

from typing import Callable

import torch
import torch.distributed as dist
from torch import nn

from trainkit.buffers import BufferClient


class ShardedParam:
    def __init__(self, shard: torch.Tensor, full_numel: int):
        self.shard = shard
        self.full_numel = full_numel
        self.full: torch.Tensor | None = None
        self.uses = 0


class ZeroManager:
    def __init__(self, client: BufferClient, params: list[ShardedParam]):
        self.client = client
        self.params = params
        self.carry: torch.Tensor | None = None

    def gather(self, p: ShardedParam) -> torch.Tensor:
        if p.full is None:
            p.full = self.client.fetch()  # clean: near miss, only when none is held, release() hands it in
            dist.all_gather_into_tensor(p.full[: p.full_numel], p.shard)
        p.uses += 1
        return p.full[: p.full_numel]

    def release(self, p: ShardedParam) -> None:
        p.uses -= 1
        if p.uses == 0:
            self.client.hand_in(p.full)
            p.full = None

    def module_forward(self, p: ShardedParam, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        w = self.gather(p)  # clean: released after the call
        y = fn(w)
        self.release(p)
        return y

    def module_forward_skip(self, p: ShardedParam, fn: Callable[[torch.Tensor], torch.Tensor], skip: bool):
        w = self.gather(p)  # leak: the skipped module returns with its use counted
        if skip:
            return None
        y = fn(w)
        self.release(p)
        return y

    def norms(self) -> list[float]:
        out = []
        for p in self.params:
            w = self.gather(p)  # leak: zero parameters continue without release
            n = float(w.norm())
            if n == 0.0:
                continue
            out.append(n)
            self.release(p)
        return out

    def export(self) -> list[torch.Tensor]:
        out = []
        for p in self.params:
            out.append(self.gather(p).float())  # leak: converted copies are kept, no parameter is released
        return out

    def export_fp32(self) -> list[torch.Tensor]:
        out = []
        for p in self.params:
            out.append(self.gather(p).float())  # clean: near miss, converted and released in the same round
            self.release(p)
        return out

    def reduce_scatter(self, p: ShardedParam, grad: torch.Tensor) -> torch.Tensor:
        buf = self.client.fetch()  # clean: near miss, narrowed under another name and the buffer itself handed in
        flat = buf[: grad.numel()]
        flat = flat.copy_(grad.view(-1))
        out = torch.empty_like(p.shard)
        dist.reduce_scatter_tensor(out, flat)
        self.client.hand_in(buf)
        return out

    def reduce_scatter_upcast(self, p: ShardedParam, grad: torch.Tensor) -> torch.Tensor:
        buf = self.client.fetch()  # leak: .float() makes another tensor, which is handed in
        buf[: grad.numel()].copy_(grad.view(-1))
        buf = buf.float()
        out = torch.empty_like(p.shard, dtype=torch.float32)
        dist.reduce_scatter_tensor(out, buf[: grad.numel()])
        self.client.hand_in(buf)
        return out

    def set_carry(self, x: torch.Tensor) -> None:
        self.carry = self.client.fetch()  # leak: the carry of the call before is overwritten
        self.carry[: x.numel()].copy_(x.view(-1))

    def carry_over(self, xs: list[torch.Tensor]) -> None:
        for x in xs:
            self.set_carry(x)
        self.drop_carry()

    def drop_carry(self) -> None:
        if self.carry is not None:
            self.client.hand_in(self.carry)
            self.carry = None


def register(module: nn.Module, mgr: ZeroManager, p: ShardedParam) -> None:
    def pre(_m, _inp):
        mgr.gather(p)  # clean: near miss, the post hook releases

    def post(_m, _inp, _out):
        mgr.release(p)

    module.register_forward_pre_hook(pre)
    module.register_forward_hook(post)
