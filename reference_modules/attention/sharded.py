"""Dilated attention over a sequence that is spread over ranks, as one autograd function."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from reference_modules.attention.autograd import full_precision, once_only
from reference_modules.attention.gather_pass import Gathering, Squeezed
from reference_modules.attention.joint import Grads, Inputs, Plan, Softmax, lse_dtype
from reference_modules.attention.pairwise import DilatedWork, Work
from reference_modules.attention.plain import accumulation_dtype
from reference_modules.attention.ring_pass import KeyFilter, Ring, ring_backward, ring_forward
from reference_modules.attention.seeds import derived
from reference_modules.attention.workspace import Pool, accumulator


@dataclass(frozen=True, slots=True)
class Job:
    """What goes around the ring, which stops early where it can, and what is gathered instead."""

    ring: Ring
    work: Work
    squeezed: tuple[Squeezed, ...] = ()

    @staticmethod
    def of(ring: Ring, plan: Plan, like: Tensor, gather_at_most: float) -> Job:
        """Gather where that takes at most so many times a rank's own keys."""
        gathered = what_gathers(ring, plan, like, gather_at_most)
        others = tuple(x for i, x in enumerate(plan.branches) if i not in gathered)
        squeezed = tuple(Squeezed.of(ring, plan, i) for i in gathered)
        return Job(ring, DilatedWork(replace(plan, branches=others)), squeezed)

    def start_gathering(
        self, inputs: Inputs, without: KeyFilter, pool: Pool | None, held: ExitStack
    ) -> list[Gathering]:
        """The exchanges are under way when this returns."""
        return [Gathering(branch, inputs, without, pool, held) for branch in self.squeezed]

    def filter(self, mask_RBN: Tensor | None, seed: Tensor | None) -> KeyFilter:
        """Ranks that were seeded alike still draw apart."""
        own_seed = None if seed is None else derived(int(seed), self.ring.peers.rank)
        return KeyFilter(mask_RBN, own_seed)


def what_gathers(ring: Ring, plan: Plan, like: Tensor, most: float) -> tuple[int, ...]:
    """The branches whose keys, a row in r from every rank that matters, are at most `most` times one's own.

    Every rank asks for all ranks, so that all decide alike.  A branch that needs no other rank's keys stays
    in the ring's first step, where nothing travels.
    """
    found = []
    for index, branch in enumerate(plan.branches):
        r = branch.dilation
        if branch.segment % r or any(chunk.start % r or chunk.length % r for chunk in ring.mine):
            continue
        squeezed = Squeezed.of(ring, plan, index)
        sources = max(len(squeezed.sources(rank, like)) for rank in range(ring.peers.ranks))
        if sources and (sources + 1) / r <= most:
            found.append(index)
    return tuple(found)


class ShardedAttention(torch.autograd.Function):
    """This rank's (q, k, v) → (out, lse); every rank of the group calls it, forward and backward.

    `mask_RBN` holds the padding masks of all ranks: they are small, so they are gathered beforehand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BNHD: Tensor,
        k_BNHD: Tensor,
        v_BNHD: Tensor,
        mask_RBN: Tensor | None,
        seed: Tensor | None,
        job: Job,
        pool: Pool | None,
    ) -> tuple[Tensor, Tensor]:
        inputs, without = Inputs(q_BNHD, k_BNHD, v_BNHD), job.filter(mask_RBN, seed)
        work = accumulation_dtype(q_BNHD.dtype)
        lse_BNH = torch.full(q_BNHD.shape[:3], -math.inf, dtype=lse_dtype(q_BNHD.dtype), device=q_BNHD.device)
        with ExitStack() as held, full_precision(q_BNHD):
            out_BNHD = held.enter_context(accumulator(q_BNHD, work, pool))
            state = Softmax(out_BNHD, lse_BNH)
            gathering = job.start_gathering(inputs, without, pool, held)
            ring_forward(job.ring, job.work, inputs, without, state, pool)
            for branch in gathering:
                branch.forward(state)
            out_BNHD = out_BNHD.to(q_BNHD.dtype)
        ctx.save_for_backward(q_BNHD, k_BNHD, v_BNHD, out_BNHD, lse_BNH, mask_RBN, seed)
        ctx.job, ctx.pool = job, pool
        lse_BNH = lse_BNH.to(work)
        ctx.mark_non_differentiable(lse_BNH)
        ctx.set_materialize_grads(False)  # else zeros are made for lse in each backward
        return out_BNHD, lse_BNH

    @staticmethod
    def backward(ctx: Any, dout_BNHD: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q_BNHD, k_BNHD, v_BNHD, out_BNHD, lse_BNH, mask_RBN, seed = ctx.saved_tensors
        if dout_BNHD is None:  # the other ranks count on this one all the same
            dout_BNHD = torch.zeros_like(out_BNHD)
        job, pool = ctx.job, ctx.pool
        without = job.filter(mask_RBN, seed)
        inputs, state = Inputs(q_BNHD, k_BNHD, v_BNHD), Softmax(out_BNHD, lse_BNH)
        work = accumulation_dtype(q_BNHD.dtype)
        with torch.no_grad(), ExitStack() as held, full_precision(q_BNHD):
            sums = [held.enter_context(accumulator(x, work, pool)) for x in (q_BNHD, k_BNHD, v_BNHD)]
            grads = Grads(*sums)
            gathering = job.start_gathering(inputs, without, pool, held)
            ring_backward(job.ring, job.work, dout_BNHD, inputs, without, state, grads, pool)
            for branch in gathering:
                branch.backward(dout_BNHD, state, grads)
            dq, dk, dv = (x.to(q_BNHD.dtype) for x in sums)
        return (*once_only(dout_BNHD, q_BNHD, (dq, dk, dv)), None, None, None, None)
