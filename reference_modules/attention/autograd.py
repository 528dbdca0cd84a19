"""The joint attention as one autograd function that saves q, k, v, out and lse and nothing else.

Dropout adds a seed (its masks are drawn again), a key mask adds itself, and `detach_mixing` adds what each
branch returned, because with the mixing weights held constant every branch has its own softmax gradient.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from reference_modules.attention.even import EvenBranches
from reference_modules.attention.geometry import Chunk, Tile, tiles
from reference_modules.attention.halving import in_halves_if_needed, ran_out_of_memory, say_so
from reference_modules.attention.joint import (
    Grads,
    Inputs,
    Plan,
    Softmax,
    backward_tile,
    compute_dtype,
    forward_tile,
    joint_views,
    lse_dtype,
    reads_in_place,
)
from reference_modules.attention.kernels import Kernel
from reference_modules.attention.plain import accumulation_dtype
from reference_modules.attention.precision import for_kernels, large_lse, needs_float64
from reference_modules.attention.workspace import Pool, accumulator, scratch_for

T = TypeVar("T")
TakeIn = Callable[..., None]  # a tile and what its kernel returned
Parts = dict[Tile, tuple[Tensor, Tensor]]  # out and lse of every kernel call that was made


def attend(
    inputs: Inputs, plan: Plan, pool: Pool | None, seed: Tensor | None
) -> tuple[Tensor, Tensor, Parts]:
    """out in the queries' type, lse in `lse_dtype`, and the parts if the gradient will want them."""
    q_BNHD = inputs.q_BNHD
    if (evenly := _evenly(inputs, plan, lambda branches: branches.attend(inputs, pool))) is not None:
        return *evenly, {}
    pool = scratch_for(pool, q_BNHD)
    with ExitStack() as held:
        state, parts = _joint_softmax(inputs, plan, pool, seed, held)
        out_BNHD, lse_BNH = state.out_BNHD.to(q_BNHD.dtype), state.lse_BNH
        if needs_float64(q_BNHD, lse_BNH, plan):  # only for its rows: no row may depend on another's size
            exact, _ = _joint_softmax(replace(inputs, in_float64=True), plan, pool, seed, held)
            large_BNH = lse_BNH.abs() > large_lse(q_BNHD, plan)
            out_BNHD = torch.where(large_BNH.unsqueeze(-1), exact.out_BNHD.to(q_BNHD.dtype), out_BNHD)
            lse_BNH = torch.where(large_BNH, exact.lse_BNH, lse_BNH)
        return out_BNHD, lse_BNH, parts


def _joint_softmax(
    inputs: Inputs, plan: Plan, pool: Pool | None, seed: Tensor | None, held: ExitStack
) -> tuple[Softmax, Parts]:
    """out as it was summed up; it may be leased for as long as `held`."""
    q_BNHD = inputs.q_BNHD
    masked = inputs.visible_BNH1 is not None
    parts: Parts = {}
    with full_precision(q_BNHD):
        slabs, first = _slabs(plan, q_BNHD)
        done = 0
        if (state := _first_branch_at_once(inputs, plan, pool)) is not None:
            done = first
        else:
            out_BNHD = held.enter_context(accumulator(q_BNHD, inputs.sum_dtype, pool, zero=first == 0))
            lse_BNH = q_BNHD.new_full(q_BNHD.shape[:3], -math.inf, dtype=lse_dtype(q_BNHD.dtype))
            state = Softmax(out_BNHD, lse_BNH)
        kernels = _kernels(plan, q_BNHD, masked, pool, seed, len(slabs))
        for index, slab in enumerate(slabs[done:], done):
            kernel = kernels[index]
            take_in = state.put if index < first else state.merge

            def run(tile: Tile, kernel: Kernel = kernel, take_in: TakeIn = take_in) -> None:
                part = forward_tile(tile, inputs, kernel, plan.scale, pool)
                take_in(tile, *part)
                if plan.detach_mixing:
                    parts[tile] = part

            in_halves_if_needed(slab, run)
        return state, parts


def attend_backward(
    dout_BNHD: Tensor,
    inputs: Inputs,
    out_BNHD: Tensor,
    lse_BNH: Tensor,
    parts: Parts,
    plan: Plan,
    pool: Pool | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the inputs' type."""
    q_BNHD = inputs.q_BNHD
    rows = (dout_BNHD, inputs, out_BNHD, lse_BNH)
    if (evenly := _evenly(inputs, plan, lambda branches: branches.gradients(*rows, pool))) is not None:
        return evenly
    pool = scratch_for(pool, q_BNHD)
    with ExitStack() as held, full_precision(q_BNHD):
        if needs_float64(q_BNHD, lse_BNH, plan):  # all rows, and out anew: it was rounded when it was saved
            inputs = replace(inputs, in_float64=True)
            state, parts = _joint_softmax(inputs, plan, pool, seed, held)
            out_BNHD, lse_BNH = state.out_BNHD, state.lse_BNH
        elif not plan.detach_mixing:  # its branches' own softmaxes are compared with it
            lse_BNH = for_kernels(q_BNHD, lse_BNH)
        everything = (q_BNHD, inputs.k_BNHD, inputs.v_BNHD)
        slabs, first = _slabs(plan, q_BNHD)
        kernels = _kernels(plan, q_BNHD, inputs.visible_BNH1 is not None, pool, seed, len(slabs))

        def gradients(index: int, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
            kernel = kernels[index]
            dout, out, lse = tile.query_views(dout_BNHD), *joint_views(tile, out_BNHD, lse_BNH)
            if plan.detach_mixing:
                part = parts.get(tile) or forward_tile(tile, inputs, kernel, plan.scale, pool)
                dout, out, lse = _own_softmax(tile, dout, lse, part)
            return backward_tile(tile, dout, inputs, out, lse, kernel, plan.scale, pool)

        total, whole = None, _whole_tile(plan, inputs)
        if whole is not None and (
            first == 1 or (lse_BNH.dtype == q_BNHD.dtype and reads_in_place(whole, inputs))
        ):
            total = _unless_out_of_memory(
                lambda: whole, lambda: Grads(*(_in_rows(grad, q_BNHD) for grad in gradients(0, whole)))
            )
        done = 0 if total is None else first
        if total is None:
            total = Grads(
                *(
                    held.enter_context(accumulator(x, inputs.sum_dtype, pool, zero=first == 0))
                    for x in everything
                )
            )
        for index in range(done, len(slabs)):
            take_in = total.put if index < first else total.add

            def run(tile: Tile, index: int = index, take_in: TakeIn = take_in) -> None:
                take_in(tile, *gradients(index, tile))

            in_halves_if_needed(slabs[index], run)
        dq, dk, dv = (x.to(q_BNHD.dtype) for x in (total.dq_BNHD, total.dk_BNHD, total.dv_BNHD))
        return dq, dk, dv


class JointAttention(torch.autograd.Function):
    """(q, k, v) → (out, lse); lse carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BNHD: Tensor,
        k_BNHD: Tensor,
        v_BNHD: Tensor,
        key_padding_mask_BN: Tensor | None,
        seed: Tensor | None,
        plan: Plan,
        pool: Pool | None,
    ) -> tuple[Tensor, Tensor]:
        inputs = Inputs.of(q_BNHD, k_BNHD, v_BNHD, key_padding_mask_BN)
        out_BNHD, lse_BNH, parts = attend(inputs, plan, pool, seed)
        flat = [x for part in parts.values() for x in part]
        ctx.save_for_backward(q_BNHD, k_BNHD, v_BNHD, out_BNHD, lse_BNH, key_padding_mask_BN, seed, *flat)
        ctx.plan, ctx.pool, ctx.tiles = plan, pool, tuple(parts)
        lse_BNH = lse_BNH.to(accumulation_dtype(q_BNHD.dtype))
        ctx.mark_non_differentiable(lse_BNH)
        ctx.set_materialize_grads(False)  # else zeros are made for lse in each backward
        return out_BNHD, lse_BNH

    @staticmethod
    def backward(ctx: Any, dout_BNHD: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout_BNHD is None:
            return (None,) * 7
        q_BNHD, k_BNHD, v_BNHD, out_BNHD, lse_BNH, mask_BN, seed, *flat = ctx.saved_tensors
        inputs = Inputs.of(q_BNHD, k_BNHD, v_BNHD, mask_BN)
        parts = dict(zip(ctx.tiles, zip(flat[::2], flat[1::2], strict=True), strict=True))
        with torch.no_grad():
            grads = attend_backward(dout_BNHD, inputs, out_BNHD, lse_BNH, parts, ctx.plan, ctx.pool, seed)
        return (*once_only(dout_BNHD, q_BNHD, grads), None, None, None, None)


def once_only(dout: Tensor, q: Tensor, grads: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, which under create_graph=True refuse to be differentiated again."""
    if not torch.is_grad_enabled():
        return grads
    return cast(tuple[Tensor, Tensor, Tensor], _OnceOnly.apply(dout, q, *grads))  # type: ignore[no-untyped-call]


class _OnceOnly(torch.autograd.Function):
    """Passes gradients through under create_graph=True and refuses to be differentiated itself."""

    @staticmethod
    def forward(ctx: Any, dout: Tensor, q: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(
            "dilated_attention has no second derivative: its backward runs fused kernels that have none. "
            "Ask only for the first derivative (create_graph=False), or write the masked softmax yourself."
        )


def _evenly(inputs: Inputs, plan: Plan, make: Callable[[EvenBranches], T | None]) -> T | None:
    """What one kernel call for each branch gives; None where that does not serve or fit."""
    if (branches := EvenBranches.of(plan, inputs)) is None:
        return None
    whole = Chunk(0, inputs.q_BNHD.shape[1])
    with full_precision(inputs.q_BNHD):
        first = partial(tiles, plan.branches[0], whole, whole, plan.causal)
        return _unless_out_of_memory(lambda: first()[0], lambda: make(branches))


def _slabs(plan: Plan, q_BNHD: Tensor) -> tuple[tuple[Tile, ...], int]:
    """All kernel calls, and how many of them write rows that hold nothing yet."""
    whole = Chunk(0, q_BNHD.shape[1])
    return plan.slabs(q_BNHD, whole, whole), plan.first_slabs(q_BNHD, whole)


def _first_branch_at_once(inputs: Inputs, plan: Plan, pool: Pool | None) -> Softmax | None:
    """What one kernel call over all rows returned, where that can serve as the sum and memory allows it."""
    q_BNHD = inputs.q_BNHD
    if (tile := _whole_tile(plan, inputs)) is None:
        return None
    kernel = plan.kernel_for(q_BNHD, inputs.visible_BNH1 is not None, pool, None)
    return _unless_out_of_memory(
        lambda: tile, lambda: _adopt(forward_tile(tile, inputs, kernel, plan.scale, pool), q_BNHD)
    )


def _unless_out_of_memory(tile: Callable[[], Tile], make: Callable[[], T]) -> T | None:
    """None where memory ran out, of which a tile tells; what is done instead goes slab by slab."""
    made: list[T] = []
    if not ran_out_of_memory(lambda: made.append(make())):
        return made[0]
    say_so(tile(), "slabs")
    return None


def _whole_tile(plan: Plan, inputs: Inputs) -> Tile | None:
    """A first branch in one kernel call, where its output can serve as the sum.

    Not where it is kept as it is (detach_mixing), where backward must cut alike to draw the same dropout, nor
    where sums have another type.
    """
    q_BNHD = inputs.q_BNHD
    w, n = plan.branches[0].segment, q_BNHD.shape[1]
    plain_sum = (
        compute_dtype(q_BNHD) == accumulation_dtype(q_BNHD.dtype) == q_BNHD.dtype and not inputs.in_float64
    )
    if plan.branches[0].dilation > 1 or plan.detach_mixing or plan.dropout or not plain_sum or not n:
        return None
    whole = Chunk(0, n)
    return tiles(plan.branches[0], whole, whole, plan.causal)[0] if n % w == 0 or n < w else None


def _adopt(part: tuple[Tensor, Tensor], q_BNHD: Tensor) -> Softmax:
    """What a tile over all rows returned."""
    out_BSHLD, lse_BSHL = part
    out_BNHD = _in_rows(out_BSHLD, q_BNHD)
    lse_BNH = lse_BSHL.transpose(2, 3).reshape(q_BNHD.shape[:3])
    return Softmax(out_BNHD, lse_BNH.to(lse_dtype(q_BNHD.dtype)).contiguous())


def _in_rows(x_BSHLD: Tensor, q_BNHD: Tensor) -> Tensor:
    """(b, n, h, d) of a tile over all rows; the fused CPU kernel lays it out like that already."""
    return x_BSHLD.transpose(2, 3).reshape(q_BNHD.shape).contiguous()


def _kernels(
    plan: Plan, q_BNHD: Tensor, masked: bool, pool: Pool | None, seed: Tensor | None, slabs: int
) -> list[Kernel]:
    """One for each slab; the same for all where nothing is drawn."""
    if seed is None:
        return [plan.kernel_for(q_BNHD, masked, pool, None)] * slabs
    first = int(seed)
    return [plan.kernel_for(q_BNHD, masked, pool, first + index) for index in range(slabs)]


def _own_softmax(
    tile: Tile, dout: list[Tensor], lse: list[Tensor], part: tuple[Tensor, Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """With constant mixing weights exp(l_i − lse), a branch's gradient is its own softmax's, so weighted."""
    out_i, lse_i = part
    sizes = [run.count for run in tile.runs]
    lse_views = [x.unsqueeze(-1) for x in torch.split(lse_i, sizes, 2)]
    weighted = []
    for grad, joint, own in zip(dout, lse, lse_views, strict=True):
        weight = (own - joint).exp().masked_fill_(own == -math.inf, 0.0)
        weighted.append((grad * weight).to(grad.dtype))
    return weighted, list(torch.split(out_i, sizes, 2)), lse_views


def full_precision(q: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast would turn the plain path's float32 products into half precision."""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):  # the context alone costs as much as a small kernel call
        return contextlib.nullcontext()
    return torch.amp.autocast(kind, enabled=False)
