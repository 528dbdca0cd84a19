"""Optimizer-state offload: pinned chunks for master weights and moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, NamedTuple

import torch
from torch import Tensor


class ChunkLease(NamedTuple):
    idx: int
    data: Tensor


@dataclass
class OffloadConfig:
    chunk_numel: int = 1 << 16
    n_chunks: int = 32
    use_pool: bool = True
    stochastic_rounding: bool = False


class ChunkPool:
    def __init__(self, cfg: OffloadConfig):
        self.arena = torch.zeros(cfg.n_chunks, cfg.chunk_numel)
        self.in_use = torch.zeros(cfg.n_chunks, dtype=torch.bool)

    def rent(self) -> ChunkLease:
        idle = (~self.in_use).nonzero()
        if idle.numel() == 0:
            raise RuntimeError("all chunks rented")
        i = int(idle[0])
        self.in_use[i] = True
        return ChunkLease(i, self.arena[i])

    def give_up(self, lease: ChunkLease) -> None:
        self.in_use[lease.idx] = False


class ParamState:
    def __init__(self, master: ChunkLease, m: ChunkLease, v: ChunkLease):
        self.master, self.m, self.v = master, m, v

    def leases(self) -> Iterator[ChunkLease]:
        yield self.master
        yield self.m
        yield self.v


class OffloadedAdam:
    def __init__(self, params, cfg: OffloadConfig, pool: ChunkPool | None = None, lr=1e-3):
        self.params = list(params)
        self.cfg = cfg
        self.pool = pool or ChunkPool(cfg)
        self.lr = lr
        self.state: dict[int, ParamState] = {}
        self._noise: ChunkLease | None = None
        if cfg.stochastic_rounding:
            self._noise = self.pool.rent()  # clean: near miss, shutdown() gives it up where the option is on

    def init_state(self, i: int) -> ParamState:
        if i not in self.state:
            st = ParamState(self.pool.rent(), self.pool.rent(), self.pool.rent())  # clean: in the state table, shutdown() and drop_state()
            for lease in st.leases():
                lease.data.zero_()
            self.state[i] = st
        return self.state[i]

    def drop_state(self, i: int) -> None:
        st = self.state.pop(i, None)
        if st is None:
            return
        for lease in st.leases():
            self.pool.give_up(lease)

    def shutdown(self) -> None:
        for i in list(self.state):
            self.drop_state(i)
        if self.cfg.stochastic_rounding:
            self.pool.give_up(self._noise)
            self._noise = None

    def step(self) -> None:
        tmp = None
        if self.cfg.use_pool:
            tmp = self.pool.rent()  # clean: near miss, given up under the same option
        for i, p in enumerate(self.params):
            if p.grad is None:
                continue
            st = self.init_state(i)
            g = p.grad.view(-1)
            n = g.numel()
            if tmp is not None:
                tmp.data[:n].copy_(g)
                g = tmp.data[:n]
            st.m.data[:n].lerp_(g, 0.1)
            st.v.data[:n].mul_(0.99).addcmul_(g, g, value=0.01)
            p.data.view(-1).addcdiv_(st.m.data[:n], st.v.data[:n].sqrt().add_(1e-8), value=-self.lr)
        if self.cfg.use_pool:
            self.pool.give_up(tmp)

    def clip(self, max_norm: float) -> float:
        lease = self.pool.rent()  # leak: under the limit there is nothing to scale and the return skips the end
        acc = lease.data[: len(self.params)]
        for i, p in enumerate(self.params):
            acc[i] = p.grad.norm() if p.grad is not None else 0.0
        norm = float(acc.norm())
        if norm <= max_norm:
            return norm
        for p in self.params:
            if p.grad is not None:
                p.grad.mul_(max_norm / norm)
        self.pool.give_up(lease)
        return norm

    def round_(self, p: Tensor) -> None:
        noise = self._noise if self.cfg.stochastic_rounding else self.pool.rent()  # clean: near miss, given up when it is not the kept one
        noise.data[: p.numel()].uniform_(-0.5, 0.5)
        p.view(-1).add_(noise.data[: p.numel()]).round_()
        if not self.cfg.stochastic_rounding:
            self.pool.give_up(noise)

    def round_scaled(self, p: Tensor) -> None:
        noise = self._noise if self.cfg.stochastic_rounding else self.pool.rent()  # leak: only the kept noise is ever given up, the rented one never is
        noise.data[: p.numel()].uniform_(-0.5, 0.5)
        p.view(-1).add_(noise.data[: p.numel()]).round_()
        if self.cfg.use_pool and self.cfg.stochastic_rounding:
            noise.data.zero_()
        elif self.cfg.stochastic_rounding:
            self.pool.give_up(noise)

    def master_of(self, p: Tensor) -> Tensor:
        lease = self.pool.rent()  # leak: a clone of the row leaves, the lease is dropped
        lease.data[: p.numel()].copy_(p.view(-1))
        return lease.data[: p.numel()].clone()

    def load_master(self, i: int, values: Tensor) -> None:
        st = self.init_state(i)
        fresh = self.pool.rent()  # clean: near miss, swapped in and the old one given up
        fresh.data[: values.numel()].copy_(values)
        self.pool.give_up(st.master)
        st.master = fresh

    def reload_moment(self, i: int, values: Tensor) -> None:
        st = self.init_state(i)
        fresh = self.pool.rent()  # leak: copied to the moment in use and then only half the cases give it up
        fresh.data[: values.numel()].copy_(values)
        if bool(torch.isfinite(fresh.data[: values.numel()]).all()):
            st.m.data.copy_(fresh.data)
            self.pool.give_up(fresh)

    def snapshot(self) -> list[Tensor]:
        outs = []
        lease = self.pool.rent()  # clean: given up after the loop
        for i in self.state:
            lease.data.copy_(self.state[i].master.data)
            outs.append(lease.data.clone())
        self.pool.give_up(lease)
        return outs
