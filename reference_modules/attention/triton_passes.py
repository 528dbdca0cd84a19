"""What even branches need beside their kernels, as Triton kernels of one pass over the sequence each.

A branch (w, r) that cuts the sequence evenly gives head j the tokens t with t mod r = o_j, wherever segments
begin.  So row m of its gathered tensor is token m·r + o_j, and token t is row t // r of the heads whose
offset is t mod r.  One launch serves all branches and all tensors: at these sizes launches cost more than
bytes.  A program takes some tokens and a block of their h·d numbers, which lie side by side.

Needs Triton 3.3, the first that takes tuples of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 4096  # of one program
_MOST_WIDE = 1024


@triton.jit
def _takes(t, head, heads, dilation: tl.constexpr, paper: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a head of the branch attends at a token."""
    return t % dilation == (head % dilation if paper else head // tl.cdiv(heads, dilation))


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    sources,
    targets,
    b_step,
    n_step,
    n,
    heads,
    dim,
    width,
    R: tl.constexpr,
    paper: tl.constexpr,
    T: tl.constexpr,
    X: tl.constexpr,
):
    """(b, n, h·d) sources to (b, n / r, h·d) targets: each source is read once, whatever the branches."""
    t = (tl.program_id(0) * T + tl.arange(0, T))[:, None]
    x = (tl.program_id(1) * X + tl.arange(0, X))[None, :]
    batch = (tl.program_id(2) // len(sources)).to(tl.int64)
    inside = (t < n) & (x < width)
    for j in tl.static_range(len(sources)):
        if tl.program_id(2) % len(sources) == j:
            values = tl.load(sources[j] + batch * b_step + t.to(tl.int64) * n_step + x, mask=inside)
            for i in tl.static_range(len(R)):
                row = batch * (n // R[i]) + t // R[i]
                kept = inside & _takes(t, x // dim, heads, R[i], paper)
                tl.store(targets[i * len(sources) + j] + row * width + x, values, mask=kept)


@triton.jit
def _cut_lse(lse, targets, rows, n, heads, R: tl.constexpr, paper: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """(b, n, h) to (b · segments, h, rows) of every branch."""
    t = tl.program_id(0) * T + tl.arange(0, T)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    values = tl.load(lse + (batch * n + t) * heads + head, mask=t < n)
    for i in tl.static_range(len(R)):
        row = batch * (n // R[i]) + t // R[i]
        at = (row // rows[i] * heads + head) * rows[i] + row % rows[i]
        tl.store(targets[i] + at, values, mask=(t < n) & _takes(t, head, heads, R[i], paper))


@triton.jit
def _mix(  # type: ignore[no-untyped-def]
    outs,
    lses,
    rows,
    mixed,
    lse,
    n,
    heads,
    dim,
    R: tl.constexpr,
    paper: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """The branches' out (b · n / r, h, d) and lse (b · segments, h, rows) to the joint softmax's.

    Nothing is rounded but the result.  By head: weights are worked out once for a row, not for each number.
    """
    t = tl.program_id(0) * T + tl.arange(0, T)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    x = tl.arange(0, D)
    inside = (t < n)[:, None] & (x < dim)[None, :]
    largest = tl.full((T,), float("-inf"), tl.float32)
    total = tl.zeros((T,), tl.float32)
    sums = tl.zeros((T, D), tl.float32)
    for i in tl.static_range(len(R)):
        row = batch * (n // R[i]) + t // R[i]
        kept = (t < n) & _takes(t, head, heads, R[i], paper)
        at = (row // rows[i] * heads + head) * rows[i] + row % rows[i]
        own = tl.load(lses[i] + at, mask=kept, other=float("-inf"))
        place = (row * heads + head) * dim
        values = tl.load(outs[i] + place[:, None] + x[None, :], mask=inside & kept[:, None], other=0.0)
        higher = tl.maximum(largest, own)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        before, now = tl.exp(largest - base), tl.exp(own - base)
        sums = sums * before[:, None] + values.to(tl.float32) * now[:, None]
        total = total * before + now
        largest = higher
    row = (batch * n + t) * heads + head
    some = tl.where(total == 0.0, 1.0, total)  # 0 where no branch gives the row a key
    sums = sums / some[:, None]
    tl.store(mixed + row[:, None] * dim + x[None, :], sums.to(mixed.dtype.element_ty), mask=inside)
    tl.store(lse + row, tl.where(total == 0.0, float("-inf"), largest + tl.log(some)), mask=t < n)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    parts,
    sums,
    n,
    heads,
    dim,
    width,
    R: tl.constexpr,
    paper: tl.constexpr,
    T: tl.constexpr,
    X: tl.constexpr,
):
    """The branches' gradients, each (b · n / r, h·d), to their sums (b, n, h·d)."""
    t = (tl.program_id(0) * T + tl.arange(0, T))[:, None]
    x = (tl.program_id(1) * X + tl.arange(0, X))[None, :]
    batch = (tl.program_id(2) // len(sums)).to(tl.int64)
    inside = (t < n) & (x < width)
    for j in tl.static_range(len(sums)):
        if tl.program_id(2) % len(sums) == j:
            total = tl.zeros((T, X), tl.float32)
            for i in tl.static_range(len(R)):
                row = batch * (n // R[i]) + t // R[i]
                kept = inside & _takes(t, x // dim, heads, R[i], paper)
                part = parts[i * len(sums) + j]
                total += tl.load(part + row * width + x, mask=kept, other=0.0).to(tl.float32)
            to = (batch * n + t) * width + x
            tl.store(sums[j] + to, total.to(sums[j].dtype.element_ty), mask=inside)


def gather_rows(
    sources_BNHD: Sequence[Tensor],
    targets: Sequence[Sequence[Tensor]],
    dilations: tuple[int, ...],
    paper: bool,
) -> None:
    """Fill `targets[i][j]`, (b, n / r, h, d), with what branch i takes of source j.

    The sources have one layout, in which a token's h·d numbers lie side by side.
    """
    b, n, heads, dim = sources_BNHD[0].shape
    b_step, n_step = sources_BNHD[0].stride()[:2]
    T, X = _block(heads * dim)
    grid = (-(-n // T), -(-heads * dim // X), b * len(sources_BNHD))
    into = tuple(x for row in targets for x in row)
    shape = (b_step, n_step, n, heads, dim, heads * dim)
    _gather[grid](tuple(sources_BNHD), into, *shape, dilations, paper, T, X)


def cut_lse(
    lse_BNH: Tensor, rows: tuple[int, ...], dilations: tuple[int, ...], paper: bool
) -> tuple[Tensor, ...]:
    """(b · segments, h, rows) of every branch from a contiguous lse."""
    b, n, heads = lse_BNH.shape
    found = tuple(
        lse_BNH.new_empty((b * n // r // m, heads, m)) for m, r in zip(rows, dilations, strict=True)
    )
    _cut_lse[(-(-n // 128), heads, b)](lse_BNH, found, rows, n, heads, dilations, paper, 128)
    return found


def mix_parts(
    parts: Sequence[tuple[Tensor, Tensor]],
    rows: tuple[int, ...],
    dilations: tuple[int, ...],
    like_BNHD: Tensor,
    paper: bool,
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, n, h) of the branches' out (b · segments, h, rows, d) and lse."""
    b, n, heads, dim = like_BNHD.shape
    out_BNHD = like_BNHD.new_empty(like_BNHD.shape)
    lse_BNH = like_BNHD.new_empty((b, n, heads), dtype=torch.float32)
    outs = tuple(out.transpose(1, 2).contiguous() for out, _ in parts)
    lses = tuple(lse.contiguous() for _, lse in parts)
    D = triton.next_power_of_2(dim)
    T = max(_NUMBERS // D // 2, 1)
    _mix[(-(-n // T), heads, b)](outs, lses, rows, out_BNHD, lse_BNH, n, heads, dim, dilations, paper, T, D)
    return out_BNHD, lse_BNH


def sum_parts(
    parts: Sequence[Sequence[Tensor]], dilations: tuple[int, ...], like_BNHD: Tensor, paper: bool
) -> tuple[Tensor, ...]:
    """The sums, (b, n, h, d), of the branches' gradients, `parts[i]` those of branch i."""
    b, n, heads, dim = like_BNHD.shape
    sums = tuple(like_BNHD.new_empty(like_BNHD.shape) for _ in parts[0])
    flat = tuple(x.transpose(1, 2).contiguous() for part in parts for x in part)
    T, X = _block(heads * dim)
    grid = (-(-n // T), -(-heads * dim // X), b * len(sums))
    _sum[grid](flat, sums, n, heads, dim, heads * dim, dilations, paper, T, X)
    return sums


def _block(width: int) -> tuple[int, int]:
    """Tokens and numbers of a token that one program takes."""
    wide = min(triton.next_power_of_2(width), _MOST_WIDE)
    return _NUMBERS // wide, wide
