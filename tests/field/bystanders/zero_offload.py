"""Optimizer state on the host with staging of gradients."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, Dict, List, NamedTuple, Optional

import torch

logger = logging.getLogger(__name__)


class HostBuffer(NamedTuple):
    slot: int
    tensor: torch.Tensor


class HostBufferPool:
    def __init__(self, n: int, numel: int) -> None:
        self._tensors = [torch.zeros(numel) for _ in range(n)]
        self._in_use = [False] * n

    def get_host_buffer(self) -> Optional[HostBuffer]:
        for i, used in enumerate(self._in_use):
            if not used:
                self._in_use[i] = True
                return HostBuffer(i, self._tensors[i])
        return None

    def put_host_buffer(self, buf: HostBuffer) -> None:
        self._in_use[buf.slot] = False

    def idle(self) -> int:
        return self._in_use.count(False)


@dataclass
class AdamConfig:
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0


class OffloadedAdam:
    def __init__(self, params: List[torch.nn.Parameter], pool: HostBufferPool, cfg: AdamConfig) -> None:
        self.params = params
        self.pool = pool
        self.cfg = cfg
        self.m: Dict[int, torch.Tensor] = {i: torch.zeros(p.numel()) for i, p in enumerate(params)}
        self.v: Dict[int, torch.Tensor] = {i: torch.zeros(p.numel()) for i, p in enumerate(params)}
        self.staged: Dict[int, HostBuffer] = {}
        self.step_count = 0

    def stage_gradient(self, i: int) -> bool:
        p = self.params[i]
        if p.grad is None or i in self.staged:
            return False
        buf = self.pool.get_host_buffer()  # clean: staged until step puts it back
        if buf is None:
            self.step()
            buf = self.pool.get_host_buffer()  # clean: near miss, asked again after step, then staged
            if buf is None:
                raise RuntimeError("no host buffers at all")
        buf.tensor[: p.numel()].copy_(p.grad.flatten())
        self.staged[i] = buf
        return True

    def step(self) -> None:
        self.step_count += 1
        for i, buf in list(self.staged.items()):
            n = self.params[i].numel()
            g = buf.tensor[:n]
            self.m[i].lerp_(g, 1 - self.cfg.beta1)
            self.v[i].lerp_(g * g, 1 - self.cfg.beta2)
            update = self.m[i] / (self.v[i].sqrt() + self.cfg.eps)
            self.params[i].data.add_(update.view_as(self.params[i]), alpha=-self.cfg.lr)
            self.pool.put_host_buffer(buf)
        self.staged.clear()

    def global_norm(self) -> float:
        total = 0.0
        for p in self.params:
            buf = self.pool.get_host_buffer()  # leak: parameters without gradient continue while the buffer is out
            if buf is None:
                raise RuntimeError("global_norm needs one host buffer")
            if p.grad is None:
                continue
            view = buf.tensor[: p.numel()]
            view.copy_(p.grad.flatten())
            total += float(view.square().sum())
            self.pool.put_host_buffer(buf)
        return total ** 0.5

    def clip_(self) -> float:
        norm = self.global_norm()
        if norm > self.cfg.clip:
            for buf in self.staged.values():
                buf.tensor.mul_(self.cfg.clip / norm)
        return norm

    def apply(self, fn: Callable[[torch.Tensor], Optional[torch.Tensor]]) -> int:
        """Run fn on a host copy of every parameter; None leaves it as it is."""
        changed = 0
        for p in self.params:
            buf = self.pool.get_host_buffer()  # clean: near miss, put back in both arms
            if buf is None:
                return changed
            view = buf.tensor[: p.numel()].view_as(p)
            view.copy_(p.data)
            new = fn(view)
            if new is None:
                self.pool.put_host_buffer(buf)
            else:
                p.data.copy_(new)
                self.pool.put_host_buffer(buf)
                changed += 1
        return changed

    def average_with(self, others: List["OffloadedAdam"]) -> bool:
        acc = self.pool.get_host_buffer()  # clean: put back on both returns
        tmp = self.pool.get_host_buffer()  # leak: the normal end puts back acc alone
        if acc is None or tmp is None:
            if acc is not None:
                self.pool.put_host_buffer(acc)
            return False
        for i, p in enumerate(self.params):
            acc.tensor.zero_()
            for o in others:
                tmp.tensor[: p.numel()].copy_(o.m[i])
                acc.tensor.add_(tmp.tensor)
            self.m[i].copy_(acc.tensor[: p.numel()] / len(others))
        self.pool.put_host_buffer(acc)
        return True

    def swap_moments(self, i: int) -> None:
        buf = self.pool.get_host_buffer()  # clean: put back after the exchange
        if buf is None:
            self.m[i], self.v[i] = self.v[i], self.m[i]
            return
        n = self.m[i].numel()
        buf.tensor[:n].copy_(self.m[i])
        self.m[i].copy_(self.v[i])
        self.v[i].copy_(buf.tensor[:n])
        self.pool.put_host_buffer(buf)

    def discard_staged(self) -> None:
        for buf in self.staged.values():
            self.pool.put_host_buffer(buf)
        self.staged.clear()

    def describe(self) -> Dict[str, float]:
        buf = self.pool.get_host_buffer()  # leak: the size is read from the buffer, then it goes out of scope
        size = buf.tensor.numel() if buf is not None else 0
        return {"buffer_numel": size, "idle": self.pool.idle(), "steps": self.step_count}
