"""Optimizer state paging: states live on "disk" pages and are pinned while they are updated."""
from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, Sequence

import torch
from torch.optim import Optimizer

log = logging.getLogger(__name__)


@dataclass
class StatePage:
    pid: int
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    pins: int = 0
    dirty: bool = False


class Pager:
    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.pages: dict[int, StatePage] = {}
        self.resident: set[int] = set()

    def add(self, pid: int, like: torch.Tensor) -> None:
        self.pages[pid] = StatePage(pid, torch.zeros_like(like), torch.zeros_like(like))

    def pin(self, pid: int) -> StatePage:
        page = self.pages[pid]
        if pid not in self.resident:
            while len(self.resident) >= self.budget:
                self._evict()
            self.resident.add(pid)
        page.pins += 1
        return page

    def unpin(self, page: StatePage, dirty: bool = False) -> None:
        page.pins -= 1
        page.dirty |= dirty

    def _evict(self) -> None:
        for pid in self.resident:
            if self.pages[pid].pins == 0:
                self.resident.discard(pid)
                return
        raise RuntimeError("everything is pinned")

    @contextlib.contextmanager
    def pinned(self, pid: int) -> Iterator[StatePage]:
        page = self.pin(pid)  # clean: finally unpins
        try:
            yield page
        finally:
            self.unpin(page, dirty=True)


class PagedAdam(Optimizer):
    def __init__(self, params: Iterable[torch.Tensor], pager: Pager, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(list(params), dict(lr=lr, betas=betas))
        self.pager = pager
        self.t = 0
        self.ahead: dict[int, StatePage] = {}
        for group in self.param_groups:
            for p in group["params"]:
                pager.add(id(p), p.data)

    def _update(self, p: torch.Tensor, page: StatePage, group: dict) -> None:
        b1, b2 = group["betas"]
        page.exp_avg.mul_(b1).add_(p.grad, alpha=1 - b1)
        page.exp_avg_sq.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
        p.data.addcdiv_(page.exp_avg, page.exp_avg_sq.sqrt().add_(1e-8), value=-group["lr"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = closure() if closure else None
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                page = self.pager.pin(id(p))  # clean: near miss, the continue is before the pin
                self._update(p, page, group)
                self.pager.unpin(page, dirty=True)
        return loss

    @torch.no_grad()
    def step_skipping(self) -> int:
        n = 0
        for group in self.param_groups:
            for p in group["params"]:
                page = self.pager.pin(id(p))  # leak: a parameter without gradient continues with the pin
                if p.grad is None:
                    continue
                self._update(p, page, group)
                self.pager.unpin(page, dirty=True)
                n += 1
        return n

    @torch.no_grad()
    def step_guarded(self) -> bool:
        for group in self.param_groups:
            for p in group["params"]:
                page = self.pager.pin(id(p))  # leak: non-finite gradients return False with the page pinned
                if p.grad is not None:
                    if not math.isfinite(float(p.grad.norm())):
                        return False
                    self._update(p, page, group)
                self.pager.unpin(page)
        return True

    @torch.no_grad()
    def step_ctx(self) -> bool:
        for group in self.param_groups:
            for p in group["params"]:
                with self.pager.pinned(id(p)) as page:  # clean: near miss, return inside the with block
                    if p.grad is None:
                        return False
                    self._update(p, page, group)
        return True

    def prefetch(self, params: Sequence[torch.Tensor]) -> None:
        for p in params:
            if id(p) not in self.ahead:
                self.ahead[id(p)] = self.pager.pin(id(p))  # clean: release_ahead unpins every one

    def release_ahead(self) -> None:
        for page in self.ahead.values():
            self.pager.unpin(page)
        self.ahead.clear()

    def take_ahead(self, p: torch.Tensor) -> StatePage:
        page = self.ahead.pop(id(p), None)
        if page is None:
            page = self.pager.pin(id(p))  # clean: returned to the caller like the prefetched one
        return page

    @torch.no_grad()
    def step_ahead(self, params: Sequence[torch.Tensor]) -> None:
        self.prefetch(params)
        for p in params:
            page = self.take_ahead(p)  # clean: unpinned in the same turn
            if p.grad is not None:
                self._update(p, page, self.param_groups[0])
            self.pager.unpin(page, dirty=p.grad is not None)

    def moment_norms(self, params: Sequence[torch.Tensor]) -> list[float]:
        norms = []
        for p in params:
            page = self.take_ahead(p)  # leak: a clean page breaks out of the loop without unpin
            if not page.dirty:
                break
            norms.append(float(page.exp_avg.norm()))
            self.pager.unpin(page)
        return norms

    def swap_states(self, a: torch.Tensor, b: torch.Tensor) -> None:
        pa = self.pager.pin(id(a))  # leak: pa is rebound to pb's page and pb is unpinned twice
        pb = self.pager.pin(id(b))  # clean: unpinned
        pa.exp_avg, pb.exp_avg = pb.exp_avg, pa.exp_avg
        pa = pb
        self.pager.unpin(pa)
        self.pager.unpin(pb)

    def exchange_moments(self, a: torch.Tensor, b: torch.Tensor) -> None:
        pa = self.pager.pin(id(a))  # clean: near miss, names are exchanged, both are unpinned
        pb = self.pager.pin(id(b))  # clean: near miss, names are exchanged, both are unpinned
        if id(a) > id(b):
            pa, pb = pb, pa
        pa.exp_avg, pb.exp_avg = pb.exp_avg, pa.exp_avg
        self.pager.unpin(pa)
        self.pager.unpin(pb)

    def is_dirty(self, p: torch.Tensor) -> bool:
        return self.pager.pin(id(p)).dirty  # leak: the pinned page is a temporary
