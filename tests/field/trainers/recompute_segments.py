"""Selective activation checkpointing with a byte budget.

A `Grant` is permission to keep so many bytes of activations alive. Blocks that get no
grant are recomputed in backward.
"""
from __future__ import annotations

import logging
import threading
import time
from typing import Callable, Dict, List, Optional, Sequence

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

log = logging.getLogger(__name__)


class ActivationBudget:
    def __init__(self, total_bytes: int):
        self.total = total_bytes
        self._remaining = total_bytes
        self._lock = threading.Lock()

    def charge(self, nbytes: int) -> bool:
        with self._lock:  # clean: with block
            if nbytes > self._remaining:
                return False
            self._remaining -= nbytes  # clean: the charged amount is the caller's
            return True

    def refund(self, nbytes: int) -> None:
        with self._lock:  # clean: with block
            self._remaining += nbytes


class Grant:
    """Charges on entry, refunds on exit."""

    def __init__(self, budget: ActivationBudget, nbytes: int):
        self.budget = budget
        self.nbytes = nbytes
        self.granted = False

    def __enter__(self) -> "Grant":
        self.granted = self.budget.charge(self.nbytes)  # clean: near miss, exit returns early only when nothing was granted
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if not self.granted:
            return False
        self.granted = False
        self.budget.refund(self.nbytes)
        return False


class StepGrant:
    """Like Grant, for a whole step; the loop sets `skipped` after a gradient overflow."""

    def __init__(self, budget: ActivationBudget, nbytes: int):
        self.budget = budget
        self.nbytes = nbytes
        self.skipped = False
        self.held = 0

    def __enter__(self) -> "StepGrant":
        if self.budget.charge(self.nbytes):  # leak: exit returns for a skipped step before it refunds
            self.held = self.nbytes
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.skipped:
            log.info("step skipped, scale will be lowered")
            return False
        if self.held:
            self.budget.refund(self.held)
            self.held = 0
        return False


def activation_bytes(x: torch.Tensor, block: nn.Module) -> int:
    width = max((m.out_features for m in block.modules() if isinstance(m, nn.Linear)), default=x.size(-1))
    return x.numel() // x.size(-1) * width * x.element_size() * 4


class BudgetedStack(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module], budget: ActivationBudget):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.budget = budget
        self._charged: Dict[int, int] = {}
        self.recomputed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.refund_all()
        for i, block in enumerate(self.blocks):
            need = activation_bytes(x, block)
            if self.budget.charge(need):  # clean: near miss, noted in _charged, which refund_all() empties
                self._charged[i] = need
                x = block(x)
            else:
                self.recomputed += 1
                x = checkpoint(block, x, use_reentrant=False)
        return x

    def refund_all(self) -> None:
        for nbytes in self._charged.values():
            self.budget.refund(nbytes)
        self._charged.clear()

    def forward_frozen(self, x: torch.Tensor, frozen: Sequence[bool]) -> torch.Tensor:
        for block, is_frozen in zip(self.blocks, frozen):
            need = activation_bytes(x, block)
            ok = self.budget.charge(need)  # leak: for frozen blocks the continue passes over the refund
            if is_frozen:
                with torch.no_grad():
                    x = block(x)
                continue
            x = block(x) if ok else checkpoint(block, x, use_reentrant=False)
            if ok:
                self.budget.refund(need)
        return x

    def run_segment(self, x: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        need = sum(activation_bytes(x, b) for b in self.blocks[lo:hi])
        with Grant(self.budget, need) as g:  # clean: context manager
            for b in self.blocks[lo:hi]:
                x = b(x) if g.granted else checkpoint(b, x, use_reentrant=False)
        return x


def charge_with_retry(budget: ActivationBudget, nbytes: int, attempts: int, delay: float) -> bool:
    for n in range(attempts):
        if budget.charge(nbytes):  # clean: near miss, True tells the caller that it has been charged
            return True
        time.sleep(delay * (n + 1))
    return False


def eval_with_budget(stack: BudgetedStack, x: torch.Tensor, loss_fn: Callable) -> Optional[float]:
    need = sum(activation_bytes(x, b) for b in stack.blocks)
    if not charge_with_retry(stack.budget, need, 5, 0.05):  # leak: a non-finite loss returns None without refund
        return None
    with torch.no_grad():
        for b in stack.blocks:
            x = b(x)
        loss = loss_fn(x)
    if not torch.isfinite(loss):
        log.warning("non-finite evaluation loss")
        return None
    stack.budget.refund(need)
    return loss.item()


def find_max_batch(stack: BudgetedStack, sample: torch.Tensor, limit: int) -> int:
    size = 1
    charged = 0
    while size <= limit:
        need = activation_bytes(sample.expand(size, *sample.shape[1:]), stack.blocks[0])
        if not stack.budget.charge(need):  # leak: charged is overwritten in every round, only the last amount is refunded
            break
        charged = need
        size *= 2
    stack.budget.refund(charged)
    return size // 2


def reserve_logits(budget: ActivationBudget, tokens: int, vocab: int) -> int:
    nbytes = tokens * vocab * 4
    while nbytes and not budget.charge(nbytes):  # clean: near miss, the amount charged is returned, zero when none was
        nbytes //= 2
    return nbytes


def chunked_loss(budget: ActivationBudget, hidden: torch.Tensor, head: nn.Linear, target: torch.Tensor) -> torch.Tensor:
    got = reserve_logits(budget, hidden.size(0), head.out_features)  # leak: the amount is used for the chunk size and never refunded
    rows = max(1, got // (head.out_features * 4))
    losses = [
        nn.functional.cross_entropy(head(h), t, reduction="sum")
        for h, t in zip(hidden.split(rows), target.split(rows))
    ]
    return torch.stack(losses).sum() / hidden.size(0)
