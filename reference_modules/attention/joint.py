"""The joint softmax over all branches: tiles run one by one, their outputs merged, their gradients summed.

Branch i gives rows an output o_i and a log-sum-exp l_i over the keys it allows.  The softmax over the union
(a pair that m branches allow counting m times) is

    lse = log Σ exp(l_i)          out = Σ exp(l_i − lse)·o_i

built up stably, one tile at a time:  out −= σ(l_i − lse)·(out − o_i),  lse = logaddexp(lse, l_i).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference_modules.attention.geometry import Branch, Chunk, HeadRun, OffsetRule, Tile, tiles
from reference_modules.attention.kernels import Kernel, Need, choose
from reference_modules.attention.operands import Operands
from reference_modules.attention.packing import pack
from reference_modules.attention.plain import accumulation_dtype
from reference_modules.attention.workspace import Pool

LARGE_LSE = 32.0
SLAB_BYTES = {
    "cpu": 2 << 20,
    "cuda": 256 << 20,
}  # queries of a kernel call; small slabs stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class Plan:
    """What is computed, apart from the numbers themselves."""

    branches: tuple[Branch, ...]
    causal: bool
    scale: float
    dropout: float = 0.0
    detach_mixing: bool = False
    kernel: str = "auto"

    @staticmethod
    def of(
        pairs: Iterable[tuple[int, int]],
        heads: int,
        rule: OffsetRule,
        causal: bool,
        scale: float,
        dropout: float = 0.0,
        detach_mixing: bool = False,
        kernel: str = "auto",
    ) -> Plan:
        """One branch for each (segment length, dilation)."""
        branches = tuple(Branch(int(w), int(r), heads, rule) for w, r in pairs)
        return Plan(branches, causal, scale, dropout, detach_mixing, kernel)

    def slabs(self, q_BNHD: Tensor, queries: Chunk, keys: Chunk) -> Iterator[Tile]:
        """Every kernel call of the queries of one chunk over the keys of another, in a fixed order."""
        b, _, _, d = q_BNHD.shape
        budget = SLAB_BYTES.get(q_BNHD.device.type, SLAB_BYTES["cuda"])
        for branch in self.branches:
            for tile in tiles(branch, queries, keys, self.causal):
                one = b * tile.heads * max(tile.q_rows, tile.k_rows) * d * q_BNHD.element_size()
                yield from tile.slabs(max(1, budget // max(one, 1)))

    def first_slabs(self, q_BNHD: Tensor, whole: Chunk) -> int:
        """How many slabs come from a first branch that covers every row of every head; 0 where it does not.

        What they return is the first value of each row, so that nothing need be set to zero before.
        """
        if self.branches[0].dilation > 1:
            return 0
        return sum(1 for _ in replace(self, branches=self.branches[:1]).slabs(q_BNHD, whole, whole))

    def kernel_for(self, q_BNHD: Tensor, masked: bool, pool: Pool | None, seed: int | None) -> Kernel:
        return choose(Need.of(q_BNHD, masked, self.dropout, self.scale), self.kernel, pool, seed)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Queries of one chunk, keys and values of another or the same; `visible`: True = may be seen."""

    q_BNHD: Tensor
    k_BNHD: Tensor
    v_BNHD: Tensor
    visible_BNH1: Tensor | None = None
    in_float64: bool = False  # whatever the type of q: see needs_float64
    seed: int | None = None  # of dropout, another for the keys of each rank; one device keeps its own

    @staticmethod
    def of(
        q_BNHD: Tensor,
        k_BNHD: Tensor,
        v_BNHD: Tensor,
        key_padding_mask_BN: Tensor | None = None,
        seed: int | None = None,
    ) -> Inputs:
        """From the mask that callers give, where True means ignore."""
        if key_padding_mask_BN is None:
            return Inputs(q_BNHD, k_BNHD, v_BNHD, seed=seed)
        visible_BN11 = (~key_padding_mask_BN)[:, :, None, None]
        return Inputs(q_BNHD, k_BNHD, v_BNHD, visible_BN11.expand(-1, -1, k_BNHD.shape[2], -1), seed=seed)

    @property
    def sum_dtype(self) -> torch.dtype:
        """What out and gradients are summed in."""
        return torch.float64 if self.in_float64 else accumulation_dtype(self.q_BNHD.dtype)


class Blend:
    """out −= σ(l_i − lse)·(out − o_i) and lse = logaddexp(lse, l_i), worked out first and applied later."""

    def __init__(self, out: Tensor, lse: Tensor, out_i: Tensor, lse_i: Tensor) -> None:
        lse_i = lse_i.to(lse.dtype)
        share = torch.sigmoid(lse_i - lse).masked_fill_(lse_i == -math.inf, 0.0)  # −inf − −inf is NaN
        self._out, self._lse = out, lse
        self._out_i, self._share = out_i.to(out.dtype), share.unsqueeze(-1).to(out.dtype)
        self._new_lse = torch.logaddexp(lse, lse_i)

    def apply(self) -> None:
        """In place, without another allocation."""
        self._out.lerp_(self._out_i, self._share)
        self._lse.copy_(self._new_lse)


@dataclass(frozen=True, slots=True)
class Softmax:
    """The state of the joint softmax: out in the accumulation type, lse in `lse_dtype`."""

    out_BNHD: Tensor
    lse_BNH: Tensor

    def merge(self, tile: Tile, out_BSHLD: Tensor, lse_BSHL: Tensor) -> None:
        """Take in what one tile returned; a failure changes nothing, because all is computed first."""
        steps = []
        for run, heads in _spans(tile):
            lse = run.view(self.lse_BNH.unsqueeze(-1), run.q_row, tile, tile.q_rows).squeeze(-1)
            out = run.view(self.out_BNHD, run.q_row, tile, tile.q_rows)
            steps.append(Blend(out, lse, out_BSHLD[:, :, heads], lse_BSHL[:, :, heads]))
        for step in steps:
            step.apply()

    def put(self, tile: Tile, out_BSHLD: Tensor, lse_BSHL: Tensor) -> None:
        """Merge into rows that hold nothing yet."""
        for run, heads in _spans(tile):
            lse = run.view(self.lse_BNH.unsqueeze(-1), run.q_row, tile, tile.q_rows).squeeze(-1)
            run.view(self.out_BNHD, run.q_row, tile, tile.q_rows).copy_(out_BSHLD[:, :, heads])
            lse.copy_(lse_BSHL[:, :, heads])


@dataclass(frozen=True, slots=True)
class Grads:
    """Sums of the branches' gradients, in the accumulation type."""

    dq_BNHD: Tensor
    dk_BNHD: Tensor
    dv_BNHD: Tensor

    def add(self, tile: Tile, dq_BSHLD: Tensor, dk_BSHSD: Tensor, dv_BSHSD: Tensor) -> None:
        for run, heads in _spans(tile):
            run.view(self.dq_BNHD, run.q_row, tile, tile.q_rows).add_(dq_BSHLD[:, :, heads])
            run.view(self.dk_BNHD, run.k_row, tile, tile.k_rows).add_(dk_BSHSD[:, :, heads])
            run.view(self.dv_BNHD, run.k_row, tile, tile.k_rows).add_(dv_BSHSD[:, :, heads])

    def put(self, tile: Tile, dq_BSHLD: Tensor, dk_BSHSD: Tensor, dv_BSHSD: Tensor) -> None:
        """Add to rows that hold nothing yet."""
        for run, heads in _spans(tile):
            run.view(self.dq_BNHD, run.q_row, tile, tile.q_rows).copy_(dq_BSHLD[:, :, heads])
            run.view(self.dk_BNHD, run.k_row, tile, tile.k_rows).copy_(dk_BSHSD[:, :, heads])
            run.view(self.dv_BNHD, run.k_row, tile, tile.k_rows).copy_(dv_BSHSD[:, :, heads])


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float32: at scores of 1e4 a float32 lse is off by 5e-4, and every probability with it."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64


def compute_dtype(q: Tensor) -> torch.dtype:
    """Half precision on CPU computes in float32: branches are not rounded one by one before their sum."""
    return accumulation_dtype(q.dtype) if q.device.type == "cpu" else q.dtype


def forward_tile(
    tile: Tile, inputs: Inputs, kernel: Kernel, scale: float, pool: Pool | None
) -> tuple[Tensor, Tensor]:
    """(b, segments, heads, rows, d) and (b, segments, heads, rows) of one kernel call."""
    with ExitStack() as held:
        out, lse = kernel.forward(_load(tile, inputs, scale, pool, held))
    batch = (inputs.q_BNHD.shape[0], tile.segments)
    return out.view(*batch, *out.shape[1:]), lse.view(*batch, *lse.shape[1:])


def backward_tile(
    tile: Tile,
    dout: list[Tensor],
    inputs: Inputs,
    out: list[Tensor],
    lse: list[Tensor],
    kernel: Kernel,
    scale: float,
    pool: Pool | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one kernel call; `dout`, `out` and `lse` come as the views of the tile's head runs."""
    with ExitStack() as held:
        x = _load(tile, inputs, scale, pool, held)
        dtype, apart = x.q_BHLD.dtype, tile.dilation > 1
        if dtype == torch.float32 and lse[0].dtype == torch.float64:
            dout_ = pack(dout, apart, dtype, pool, held, [_rounding(x) for x in lse])
        else:
            dout_ = pack(dout, apart, dtype, pool, held)
        out_ = pack(out, apart, dtype, pool, held)
        lse_ = pack(lse, apart, accumulation_dtype(dtype), None, held).squeeze(-1)
        grads = kernel.backward(x, dout_, out_, lse_)
    batch = (inputs.q_BNHD.shape[0], tile.segments)
    dq, dk, dv = (grad.reshape(*batch, *grad.shape[1:]) for grad in grads)
    return dq, dk, dv


def joint_views(tile: Tile, out_BNHD: Tensor, lse_BNH: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The rows of the joint out and lse that a tile's backward is handed."""
    return tile.query_views(out_BNHD), tile.query_views(lse_BNH.unsqueeze(-1))


def _rounding(lse: Tensor) -> Tensor:
    """What dO must be multiplied by, as kernels take a float32 lse: their P is off by its inverse.

    P only ever multiplies dO.
    """
    off = (lse.float().double() - lse).masked_fill_(lse == -math.inf, 0.0)
    return off.exp_().float()


def needs_float64(q_BNHD: Tensor, lse_BNH: Tensor, plan: Plan) -> bool:
    """Whether scores are so large that the last bit of one in float32 is much of its probability.

    At 1e4 it is 1e-3, and which way it falls is luck.  The scores that count in a row lie near its lse.
    Within a pass all tiles go by one answer: else rounding that cancels within a type would stay.
    """
    if q_BNHD.dtype != torch.float32 or q_BNHD.device.type != "cpu" or plan.dropout or not lse_BNH.numel():
        return False
    least, most = (float(x) for x in lse_BNH.aminmax())
    if least == -math.inf:  # rows without keys
        least = float(lse_BNH.masked_fill(lse_BNH == -math.inf, 0.0).amin())
    return max(most, -least) > LARGE_LSE


def _load(tile: Tile, inputs: Inputs, scale: float, pool: Pool | None, held: ExitStack) -> Operands:
    dtype = torch.float64 if inputs.in_float64 else compute_dtype(inputs.q_BNHD)
    apart = tile.dilation > 1
    q = pack(tile.query_views(inputs.q_BNHD), apart, dtype, pool, held)
    k = pack(tile.key_views(inputs.k_BNHD), apart, dtype, pool, held)
    v = pack(tile.key_views(inputs.v_BNHD), apart, dtype, pool, held)
    keys = None
    if inputs.visible_BNH1 is not None:
        keys = pack(tile.key_views(inputs.visible_BNH1), apart, torch.bool, None, held).squeeze(-1)
    return Operands(q, k, v, scale, tile.causal, keys)


def _spans(tile: Tile) -> Iterator[tuple[HeadRun, slice]]:
    """Each run with its place among the tile's heads."""
    at = 0
    for run in tile.runs:
        yield run, slice(at, at + run.count)
        at += run.count
