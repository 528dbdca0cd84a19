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
from functools import lru_cache, partial

import torch
from torch import Tensor

from reference_modules.attention.blend import Blend, by_head
from reference_modules.attention.geometry import Branch, Chunk, HeadRun, OffsetRule, Tile, tiles
from reference_modules.attention.kernels import Kernel, Need, choose
from reference_modules.attention.operands import Operands
from reference_modules.attention.packing import pack
from reference_modules.attention.plain import accumulation_dtype
from reference_modules.attention.workspace import Pool

SLAB_BYTES = {
    "cpu": 4 << 20,
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

    def slabs(self, q_BNHD: Tensor, queries: Chunk, keys: Chunk) -> tuple[Tile, ...]:
        """Every kernel call of the queries of one chunk over the keys of another, in a fixed order."""
        return self._slabs_of(self.branches, q_BNHD, queries, keys)

    def first_slabs(self, q_BNHD: Tensor, whole: Chunk) -> int:
        """How many slabs come from a first branch that covers every row of every head; 0 where it does not.

        What they return is the first value of each row, so that nothing need be set to zero before.
        """
        first = self.branches[:1]
        return 0 if first[0].dilation > 1 else len(self._slabs_of(first, q_BNHD, whole, whole))

    def _slabs_of(
        self, branches: tuple[Branch, ...], q_BNHD: Tensor, queries: Chunk, keys: Chunk
    ) -> tuple[Tile, ...]:
        device = q_BNHD.device.type
        row = max(1, q_BNHD.shape[0] * q_BNHD.shape[3] * q_BNHD.element_size())
        rows = SLAB_BYTES.get(device, SLAB_BYTES["cuda"]) // row
        return _slabs(branches, self.causal, queries, keys, rows, device == "cpu")

    def kernel_for(self, q_BNHD: Tensor, masked: bool, pool: Pool | None, seed: int | None) -> Kernel:
        return choose(Need.of(q_BNHD, masked, self.dropout, self.scale), self.kernel, pool, seed)


@lru_cache(maxsize=256)
def _slabs(
    branches: tuple[Branch, ...], causal: bool, queries: Chunk, keys: Chunk, rows: int, run_by_run: bool
) -> tuple[Tile, ...]:
    """Tiles of at most so many rows of all their heads, but one segment at least.

    `run_by_run`: a head run is one strided view, which the CPU's kernel reads where it lies; a tile of
    several would have to be packed.
    """
    found: list[Tile] = []
    for branch in branches:
        for tile in tiles(branch, queries, keys, causal):
            for part in [replace(tile, runs=(run,)) for run in tile.runs] if run_by_run else [tile]:
                found.extend(part.slabs(max(1, rows // (part.heads * max(part.q_rows, part.k_rows)))))
    return tuple(found)


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
            step.apply(heads_third=True)

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
            for sums, row, rows, grads in (
                (self.dq_BNHD, run.q_row, tile.q_rows, dq_BSHLD),
                (self.dk_BNHD, run.k_row, tile.k_rows, dk_BSHSD),
                (self.dv_BNHD, run.k_row, tile.k_rows, dv_BSHSD),
            ):
                for total, grad in by_head(run.view(sums, row, tile, rows), grads[:, :, heads]):
                    total.add_(grad)

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
        dtype, apart = x.q_BHLD.dtype, _gather_queries(tile, inputs)
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


def _load(tile: Tile, inputs: Inputs, scale: float, pool: Pool | None, held: ExitStack) -> Operands:
    dtype = torch.float64 if inputs.in_float64 else compute_dtype(inputs.q_BNHD)
    q = pack(tile.query_views(inputs.q_BNHD), _gather_queries(tile, inputs), dtype, pool, held)
    k = pack(tile.key_views(inputs.k_BNHD), _gather_keys(tile, inputs), dtype, pool, held)
    v = pack(tile.key_views(inputs.v_BNHD), _gather_keys(tile, inputs), dtype, pool, held)
    keys = None
    if inputs.visible_BNH1 is not None:
        keys = pack(tile.key_views(inputs.visible_BNH1), tile.dilation > 1, torch.bool, None, held).squeeze(
            -1
        )
    return Operands(q, k, v, scale, tile.causal, keys, partial(tile.places, inputs.q_BNHD.shape[0]))


def _gather_queries(tile: Tile, inputs: Inputs) -> bool:
    """The CPU's kernel reads each query once, wherever it lies."""
    return tile.dilation > 1 and inputs.q_BNHD.device.type != "cpu"


def _gather_keys(tile: Tile, inputs: Inputs) -> bool:
    """Keys and values are read again and again: from so many on a copy side by side pays."""
    if inputs.q_BNHD.device.type != "cpu":
        return tile.dilation > 1
    return tile.k_rows >= (256 if tile.dilation > 1 else 1024)


def reads_in_place(tile: Tile, inputs: Inputs) -> bool:
    """Whether a tile's kernel call copies no operand, and so takes no memory beside its results."""
    as_they_are = not _gather_queries(tile, inputs) and not _gather_keys(tile, inputs)
    return as_they_are and len(tile.runs) == 1 and inputs.q_BNHD.dtype == compute_dtype(inputs.q_BNHD)


def _spans(tile: Tile) -> Iterator[tuple[HeadRun, slice]]:
    """Each run with its place among the tile's heads."""
    at = 0
    for run in tile.runs:
        yield run, slice(at, at + run.count)
        at += run.count
