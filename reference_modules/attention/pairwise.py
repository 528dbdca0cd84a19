"""The queries a rank holds over the keys of one rank, its own or another: every pair of chunks, tile by tile.

A tile that does not fit in memory is tried again in halves, with a warning; what was already added stays
added, because a tile adds its result only after all of it has been computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from reference_modules.attention.geometry import Chunk, Tile
from reference_modules.attention.joint import (
    Grads,
    Inputs,
    Plan,
    Softmax,
    backward_tile,
    forward_tile,
    joint_views,
)
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
        return any(True for q in queries for k in keys for _ in self.plan.slabs(like, q, k))

    def forward(self, inputs: Inputs, queries: Held, keys: Held, state: Softmax, pool: Pool | None) -> None:
        """Tile by tile."""
        plan = self.plan
        kernel = plan.kernel_for(inputs.q_BNHD, False, pool, None)
        for q, q_rows in _rows(queries):
            for k, k_rows in _rows(keys):
                part = _narrow(inputs, q_rows, k_rows)
                rows = Softmax(state.out_BNHD[:, q_rows], state.lse_BNH[:, q_rows])

                def run(tile: Tile, part: Inputs = part, rows: Softmax = rows) -> None:
                    rows.merge(tile, *forward_tile(tile, part, kernel, plan.scale, pool))

                for tile in plan.slabs(part.q_BNHD, q, k):
                    _in_halves_if_needed(tile, run)

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
        plan = self.plan
        kernel = plan.kernel_for(inputs.q_BNHD, False, pool, None)
        for q, q_rows in _rows(queries):
            for k, k_rows in _rows(keys):
                part = _narrow(inputs, q_rows, k_rows)
                total = Grads(grads.dq_BNHD[:, q_rows], grads.dk_BNHD[:, k_rows], grads.dv_BNHD[:, k_rows])
                at = (dout_BNHD[:, q_rows], state.out_BNHD[:, q_rows], state.lse_BNH[:, q_rows])

                def run(
                    tile: Tile,
                    part: Inputs = part,
                    total: Grads = total,
                    at: tuple[Tensor, Tensor, Tensor] = at,
                ) -> None:
                    dout, out, lse = tile.query_views(at[0]), *joint_views(tile, *at[1:])
                    total.add(tile, *backward_tile(tile, dout, part, out, lse, kernel, plan.scale, pool))

                for tile in plan.slabs(part.q_BNHD, q, k):
                    _in_halves_if_needed(tile, run)


def _rows(held: Held) -> Iterator[tuple[Chunk, slice]]:
    at = 0
    for chunk in held:
        yield chunk, slice(at, at + chunk.length)
        at += chunk.length


def _narrow(inputs: Inputs, q_rows: slice, k_rows: slice) -> Inputs:
    return Inputs(inputs.q_BNHD[:, q_rows], inputs.k_BNHD[:, k_rows], inputs.v_BNHD[:, k_rows])


def _in_halves_if_needed(tile: Tile, run: Callable[[Tile], None]) -> None:
    waiting = [tile]
    while waiting:
        part = waiting.pop()
        halves = part.halves()
        if not _fits(part, run, last_try=not halves):
            warnings.warn(
                f"out of memory on {part.segments} segments of {part.heads} heads and {part.q_rows} rows: "
                "going on in halves, which is slower; use shorter segments or more ranks to avoid it",
                RuntimeWarning,
                stacklevel=2,
            )
            waiting.extend(reversed(halves))


def _fits(tile: Tile, run: Callable[[Tile], None], last_try: bool) -> bool:
    """False where memory ran out; the caller goes on outside the except, when the failed attempt is freed."""
    try:
        run(tile)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if last_try or not _is_out_of_memory(error):
            raise
        return False
    return True


def _is_out_of_memory(error: BaseException) -> bool:
    """torch's CPU allocator raises a bare RuntimeError, so only its text tells."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
