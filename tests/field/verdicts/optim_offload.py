"""CPU-offloaded Adam with double-buffered staging."""
from __future__ import annotations

import logging
import math
from typing import Any, Iterable

import torch
from torch.optim import Optimizer

logger = logging.getLogger(__name__)


class StagePool:
    def __init__(self, numel: int, count: int = 4) -> None:
        self.numel = numel
        self._ring = [torch.zeros(numel) for _ in range(count)]
        self._head = 0
        self._tail = count
        self._count = count

    def acquire_stage(self) -> torch.Tensor:
        if self._head == self._tail:
            raise BufferError("staging ring is empty")
        t = self._ring[self._head % self._count]
        self._head += 1
        return t

    def release_stage(self, t: torch.Tensor) -> None:
        self._ring[self._tail % self._count] = t
        self._tail += 1

    def stage_in(self, src: torch.Tensor) -> torch.Tensor:
        t = self.acquire_stage()  # clean: handed out filled
        t[: src.numel()].copy_(src.flatten())
        return t

    def stage_in_checked(self, src: torch.Tensor) -> torch.Tensor | None:
        t = self.acquire_stage()  # clean: near miss, the non-finite case releases before None is returned
        t[: src.numel()].copy_(src.flatten())
        if not torch.isfinite(t[: src.numel()]).all():
            self.release_stage(t)
            return None
        return t


class OffloadAdam(Optimizer):
    def __init__(self, params: Iterable[torch.nn.Parameter], pool: StagePool, lr: float = 1e-3, overlap: bool = True) -> None:
        super().__init__(params, {"lr": lr})
        self.pool = pool
        self.overlap = overlap
        self._inflight: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._norm_buf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = self.pool.stage_in(p.grad)  # clean: near miss, overlapped ones are released by flush, others at once
                self._update(p, g, group["lr"])
                if self.overlap:
                    self._inflight.append((p, g))
                else:
                    self.pool.release_stage(g)
        self.flush()

    @torch.no_grad()
    def step_skip_bad(self) -> int:
        bad = 0
        for group in self.param_groups:
            for p in group["params"]:
                g = self.pool.stage_in(p.grad)  # leak: an exploding gradient is counted and skipped with its stage
                if float(g.norm()) > 1e4:
                    bad += 1
                    continue
                self._update(p, g, group["lr"])
                self.pool.release_stage(g)
        return bad

    @torch.no_grad()
    def step_checked(self) -> int:
        bad = 0
        for group in self.param_groups:
            for p in group["params"]:
                g = self.pool.stage_in_checked(p.grad)  # clean: near miss, continue only for None
                if g is None:
                    bad += 1
                    continue
                self._update(p, g, group["lr"])
                self.pool.release_stage(g)
        return bad

    def _update(self, p: torch.nn.Parameter, g: torch.Tensor, lr: float) -> None:
        st = self.state[p]
        if not st:
            st["m"] = torch.zeros_like(p)
            st["v"] = torch.zeros_like(p)
        gv = g[: p.numel()].view_as(p)
        st["m"].mul_(0.9).add_(gv, alpha=0.1)
        st["v"].mul_(0.999).addcmul_(gv, gv, value=0.001)
        p.data.addcdiv_(st["m"], st["v"].sqrt().add_(1e-8), value=-lr)

    def flush(self) -> None:
        for _, g in self._inflight:
            self.pool.release_stage(g)
        self._inflight = []

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        sq = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                g = self.pool.stage_in(p.grad)  # leak: the scaled copy is released in place of the stage
                g = g * (1.0 / max(1, g.numel()))
                sq += float(g.square().sum())
                self.pool.release_stage(g)
        return math.sqrt(sq) / max_norm

    @torch.no_grad()
    def global_norm(self) -> float:
        if self._norm_buf is None:
            self._norm_buf = self.pool.acquire_stage()  # clean: near miss, taken once, teardown releases it
        self._norm_buf.zero_()
        for i, p in enumerate(self.param_groups[0]["params"]):
            self._norm_buf[i] = p.grad.norm()
        return float(self._norm_buf.norm())

    def teardown(self) -> None:
        self.flush()
        if self._norm_buf is not None:
            self.pool.release_stage(self._norm_buf)
            self._norm_buf = None

    def load_moments(self, blobs: dict[str, torch.Tensor]) -> bool:
        m = self.pool.stage_in(blobs["m"])  # leak: stays out when the second blob is rejected
        v = self.pool.stage_in_checked(blobs["v"])  # clean: None or released
        if v is None:
            logger.error("second moment is not finite")
            return False
        for p in self.param_groups[0]["params"]:
            self.state[p]["m"] = m[: p.numel()].view_as(p).clone()
            self.state[p]["v"] = v[: p.numel()].view_as(p).clone()
        self.pool.release_stage(v)
        self.pool.release_stage(m)
        return True

    def export_first(self) -> torch.Tensor:
        p = self.param_groups[0]["params"][0]
        return self.pool.stage_in(p.data)[: p.numel()].clone()  # leak: a clone of the slice is returned, the stage forgotten
