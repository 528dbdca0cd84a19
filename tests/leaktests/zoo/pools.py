"""Leases that are not given back."""

from __future__ import annotations

import torch
from torch import nn

from reference_modules.mixin import MemoryPoolMixin
from reference_modules.pool import TensorPool


class _Pooled(MemoryPoolMixin, nn.Module):
    def __init__(self, pool):
        super().__init__()
        self._init_memory_pool(True, pool=pool)


def lease_never_returned(size):
    pool, kept = TensorPool(threshold_mb=0.5), []

    def step():
        kept.append(pool.allocate((size,)))  # leak

    step.pools = (pool,)
    return step


def lease_abandoned(size):
    pool = TensorPool(threshold_mb=0.5)

    def step():
        pool.allocate((size,))  # leak

    step.pools = (pool,)
    return step


def lease_lost_on_an_early_return(size):
    pool = TensorPool(threshold_mb=0.5)

    def attend(skip):
        scores = pool.allocate((size,))  # leak
        if skip:
            return
        pool.deallocate(scores)

    def step():
        attend(False)
        attend(True)

    step.pools = (pool,)
    return step


def lease_rebound(size):
    pool = TensorPool(threshold_mb=0.5)

    def step():
        scores = pool.allocate((size,), zero=True)  # leak
        scores = pool.allocate((size,), zero=True)
        pool.deallocate(scores)

    step.pools = (pool,)
    return step


def lease_through_the_mixin(size):
    module = _Pooled(TensorPool(threshold_mb=0.5))

    def step():
        module._allocate_tensor((size,), torch.float32, "cpu")  # leak

    step.pools = (module._memory_pool,)
    return step


def blocks_by_number(size):
    class Blocks:
        def __init__(self):
            self.free_list = list(range(1_000_000))

        def alloc(self):
            return self.free_list.pop()

        def free(self, block):
            self.free_list.append(block)

    blocks = Blocks()

    def step():
        blocks.free(blocks.alloc())
        blocks.alloc()  # leak

    step.pools = (blocks,)
    return step


def lease_lost_when_an_operation_fails(size):
    pool = TensorPool(threshold_mb=0.5)
    weight = torch.ones(size)

    def step():
        scores = pool.allocate((size,))  # leak
        scores.copy_(weight)
        pool.deallocate(scores)

    step.pools, step.fails = (pool,), True
    return step


def storage_kept_when_an_operation_fails(size):
    kept, weight = [], torch.ones(size)

    def step():
        scores = torch.zeros(size)  # leak
        try:
            scores.add_(weight).sum()
        except RuntimeError:
            kept.append(scores)
            raise

    step.fails = True
    return step
