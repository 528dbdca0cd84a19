"""The queries a rank holds over the keys of one rank, its own or another: pairs of chunks, tile by tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from reference_modules.attention.geometry import Chunk, Tile
from reference_modules.attention.halving import in_halves_if_needed
from reference_modules.attention.joint import (
    Grads,
    Inputs,
    Plan,
    Softmax,
    backward_tile,
    forward_tile,
    joint_views,
)
from reference_modules.attention.kernels import Kernel
from reference_modules.attention.seeds import derived
from reference_modules.attention.workspace import Pool

Held = Sequence[Chunk]  # one after the other in the rank's tensors


class Work(Protocol):
    """What is done with the keys of one rank; all ranks can tell who sees whom."""

    def sees(self, queries: Held, keys: Held, like: Tensor) -> bool:
        """Whether any query of the one sees any key of the other."""
        ...

    def forward(self, inputs: Inputs, queries: Held, keys: Held, state: Softmax, pool: Pool | None) -> None:
        """Merge what these keys give into the state of the queries."""
        ...

    def backward(
        self,
        dout_BNHD: Tensor,
        inputs: Inputs,
        queries: Held,
        keys: Held,
        state: Softmax,
        grads: Grads,
        pool: Pool | None,
    ) -> None:
        """Add these keys' share of dq and these queries' share of dk and dv; `state` is the final one."""
        ...


@dataclass(frozen=True, slots=True)
class DilatedWork:
    """All branches of a plan."""

    plan: Plan

    def sees(self, queries: Held, keys: Held, like: Tensor) -> bool:
        """Any tile at all."""
        return any(self.plan.slabs(like, q, k) for q in queries for k in keys)

    def forward(self, inputs: Inputs, queries: Held, keys: Held, state: Softmax, pool: Pool | None) -> None:
        """Tile by tile."""
        for pair in _pairs(inputs, queries, keys):
            rows = Softmax(state.out_BNHD[:, pair.q_rows], state.lse_BNH[:, pair.q_rows])
            for tile, kernel in self._calls(pair, pool):

                def run(
                    tile: Tile, pair: _Pair = pair, rows: Softmax = rows, kernel: Kernel = kernel
                ) -> None:
                    rows.merge(tile, *forward_tile(tile, pair.inputs, kernel, self.plan.scale, pool))

                in_halves_if_needed(tile, run)

    def backward(
        self,
        dout_BNHD: Tensor,
        inputs: Inputs,
        queries: Held,
        keys: Held,
        state: Softmax,
        grads: Grads,
        pool: Pool | None,
    ) -> None:
        """Tile by tile."""
        for pair in _pairs(inputs, queries, keys):
            q, k = pair.q_rows, pair.k_rows
            total = Grads(grads.dq_BNHD[:, q], grads.dk_BNHD[:, k], grads.dv_BNHD[:, k])
            at = (dout_BNHD[:, q], state.out_BNHD[:, q], state.lse_BNH[:, q])
            for tile, kernel in self._calls(pair, pool):

                def run(
                    tile: Tile,
                    pair: _Pair = pair,
                    total: Grads = total,
                    at: tuple[Tensor, Tensor, Tensor] = at,
                    kernel: Kernel = kernel,
                ) -> None:
                    dout, views = tile.query_views(at[0]), joint_views(tile, *at[1:])
                    scale = self.plan.scale
                    total.add(tile, *backward_tile(tile, dout, pair.inputs, *views, kernel, scale, pool))

                in_halves_if_needed(tile, run)

    def _calls(self, pair: _Pair, pool: Pool | None) -> Iterator[tuple[Tile, Kernel]]:
        """The tiles of a pair of chunks, in the same order in both passes: dropout draws by it."""
        q_BNHD, masked = pair.inputs.q_BNHD, pair.inputs.visible_BNH1 is not None
        for index, tile in enumerate(self.plan.slabs(q_BNHD, pair.queries, pair.keys)):
            seed = derived(pair.inputs.seed, pair.queries.start, pair.keys.start, index)
            yield tile, self.plan.kernel_for(q_BNHD, masked, pool, seed)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A chunk of queries and one of keys, where they lie in the ranks' tensors, and what lies there."""

    queries: Chunk
    keys: Chunk
    q_rows: slice
    k_rows: slice
    inputs: Inputs


def _pairs(inputs: Inputs, queries: Held, keys: Held) -> Iterator[_Pair]:
    for q, q_rows in _rows(queries):
        for k, k_rows in _rows(keys):
            yield _Pair(q, k, q_rows, k_rows, _narrow(inputs, q_rows, k_rows))


def _rows(held: Held) -> Iterator[tuple[Chunk, slice]]:
    at = 0
    for chunk in held:
        yield chunk, slice(at, at + chunk.length)
        at += chunk.length


def _narrow(inputs: Inputs, q_rows: slice, k_rows: slice) -> Inputs:
    visible = None if inputs.visible_BNH1 is None else inputs.visible_BNH1[:, k_rows]
    q, k, v = inputs.q_BNHD[:, q_rows], inputs.k_BNHD[:, k_rows], inputs.v_BNHD[:, k_rows]
    return Inputs(q, k, v, visible, seed=inputs.seed)
