"""Branches that cut the sequence evenly, on CUDA in half precision: each is one kernel call.

There launches are what costs: a branch's rows gathered run by run and merged operation by operation took four
times as long as its kernel at 8,192 tokens.  Here one pass gathers all branches' rows, each branch runs the
kernel that PyTorch would choose for it, and one pass mixes what they return; backward likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from reference_modules.attention.joint import Inputs, Plan
from reference_modules.attention.kernels import torch_chooses
from reference_modules.attention.operands import Operands
from reference_modules.attention.workspace import Pool, temporary

if TYPE_CHECKING:
    from reference_modules.attention import triton_passes

T = TypeVar("T")


@dataclass(frozen=True)
class EvenBranches:
    """All branches of a plan over n tokens; branch i has segments of `rows[i]` rows, `dilations[i]` apart."""

    rows: tuple[int, ...]
    dilations: tuple[int, ...]
    paper: bool
    causal: bool
    scale: float

    @staticmethod
    def of(plan: Plan, inputs: Inputs) -> EvenBranches | None:
        """None where this way does not serve: uneven cuts, masks, dropout, detached mixing, other types."""
        q_BNHD = inputs.q_BNHD
        half = q_BNHD.dtype in (torch.float16, torch.bfloat16)
        if not (q_BNHD.device.type == "cuda" and half and inputs.visible_BNH1 is None):
            return None
        b, n, _, dim = q_BNHD.shape
        return None if dim % 8 or not b * n or not triton_serves() else _even_branches(plan, n)

    @cached_property
    def gathered(self) -> tuple[int, ...]:
        """The dilations of branches that must be gathered; others are read where they lie."""
        return tuple(r for r in self.dilations if r > 1)

    def attend(self, inputs: Inputs, pool: Pool | None) -> tuple[Tensor, Tensor] | None:
        """out and lse of the joint softmax; None where PyTorch would run no such kernel."""
        with ExitStack() as held:
            held.enter_context(_on(inputs.q_BNHD.device))
            parts = []
            for operands, _ in self._calls((inputs.q_BNHD, inputs.k_BNHD, inputs.v_BNHD), pool, held):
                if (kernel := torch_chooses(operands)) is None:
                    return None
                parts.append(kernel.forward(operands))
            at = self._in_order(parts)
            return _passes().mix_parts(at, self.rows, self.dilations, inputs.q_BNHD, self.paper)

    def gradients(
        self, dout_BNHD: Tensor, inputs: Inputs, out_BNHD: Tensor, lse_BNH: Tensor, pool: Pool | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """dq, dk and dv from the joint out and lse; None as in `attend`."""
        with ExitStack() as held:
            held.enter_context(_on(inputs.q_BNHD.device))
            lse_parts = _passes().cut_lse(lse_BNH.contiguous(), self.rows, self.dilations, self.paper)
            lses = iter(self._undilated_first(lse_parts))
            sources = (inputs.q_BNHD, inputs.k_BNHD, inputs.v_BNHD, dout_BNHD, out_BNHD)
            parts = []
            for operands, rest in self._calls(sources, pool, held):
                if (kernel := torch_chooses(operands)) is None:
                    return None
                parts.append(kernel.backward(operands, *rest, next(lses)))
            at = self._in_order(parts)
            dq, dk, dv = _passes().sum_parts(at, self.dilations, inputs.q_BNHD, self.paper)
            return dq, dk, dv

    def _calls(
        self, sources_BNHD: tuple[Tensor, ...], pool: Pool | None, held: ExitStack
    ) -> Iterator[tuple[Operands, list[Tensor]]]:
        """For each branch q, k and v as a kernel takes them, and the other sources cut alike.

        The undilated come first: the device works on them while the others are got ready.
        """
        ready: Iterator[Sequence[Tensor]] | None = None
        for rows, r in self._undilated_first(list(zip(self.rows, self.dilations, strict=True))):
            if r > 1 and ready is None:
                ready = iter(self._gather(sources_BNHD, pool, held))
            cut = sources_BNHD if r == 1 or ready is None else next(ready)
            q, k, v, *rest = (x.reshape(-1, rows, *x.shape[2:]).transpose(1, 2) for x in cut)
            yield Operands(q, k, v, self.scale, self.causal), rest

    def _gather(
        self, sources_BNHD: tuple[Tensor, ...], pool: Pool | None, held: ExitStack
    ) -> list[list[Tensor]]:
        """(b, n / r, h, d) of every source for every branch with a dilation."""
        sources = _alike(sources_BNHD)
        b, n, *rest = sources[0].shape
        targets = [
            [held.enter_context(temporary(pool, (b, n // r, *rest), x.dtype, x.device)) for x in sources]
            for r in self.gathered
        ]
        _passes().gather_rows(sources, targets, self.gathered, self.paper)
        return targets

    @cached_property
    def _order(self) -> list[int]:
        return sorted(range(len(self.rows)), key=lambda i: self.dilations[i] > 1)

    def _undilated_first(self, of_branches: Sequence[T]) -> list[T]:
        return [of_branches[i] for i in self._order]

    def _in_order(self, undilated_first: Sequence[T]) -> list[T]:
        """As the branches were given."""
        return [undilated_first[self._order.index(i)] for i in range(len(self.rows))]


@lru_cache(maxsize=256)
def _even_branches(plan: Plan, n: int) -> EvenBranches | None:
    if plan.kernel != "auto" or plan.scale <= 0.0 or plan.dropout or plan.detach_mixing:
        return None
    cuts = [(min(branch.segment, n), branch.dilation) for branch in plan.branches]
    if any(n % w or w % r for w, r in cuts):
        return None
    rows = tuple(w // r for w, r in cuts)
    dilations = tuple(r for _, r in cuts)
    return EvenBranches(rows, dilations, plan.branches[0].rule == "paper", plan.causal, plan.scale)


def _alike(sources_BNHD: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """In one layout with a token's numbers side by side: as they are, mostly; else copies."""
    first = sources_BNHD[0]
    strides = first.stride()
    side_by_side = strides[3] == 1 and strides[2] == first.shape[3]
    if side_by_side and all(x.stride() == strides for x in sources_BNHD):
        return sources_BNHD
    return tuple(x.contiguous() for x in sources_BNHD)


@lru_cache(maxsize=1)
def triton_serves() -> bool:
    """Whether a Triton is at hand that takes tuples of tensors; PyTorch brings one for CUDA on Linux."""
    try:
        major, minor = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 3)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever its tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _passes() -> triton_passes:
    """Imported only where it is needed: there may be no Triton."""
    from reference_modules.attention import triton_passes

    return triton_passes
