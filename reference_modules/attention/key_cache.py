"""Keys and values of the tokens so far, so that generation computes each of them once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from reference_modules.attention.autograd import full_precision
from reference_modules.attention.geometry import Chunk
from reference_modules.attention.joint import Inputs, Plan, Softmax, lse_dtype
from reference_modules.attention.pairwise import DilatedWork
from reference_modules.attention.plain import accumulation_dtype
from reference_modules.attention.workspace import Pool, accumulator, temporary


class KeyCache:
    """Room for the keys and values, (b, capacity, h, d) each, of one attention module.

    Grouped keys lie here once for every query head: a branch reads heads at even distances.
    """

    def __init__(self, k_BCHD: Tensor, v_BCHD: Tensor) -> None:
        self._k, self._v = k_BCHD, v_BCHD
        self.tokens = 0

    @staticmethod
    @contextmanager
    def lease(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device, pool: Pool | None
    ) -> Iterator[KeyCache]:
        """An empty one for the length of a `with` block; its memory comes from the pool."""
        with temporary(pool, shape, dtype, device) as k, temporary(pool, shape, dtype, device) as v:
            yield KeyCache(k, v)

    def append(self, k_BMHD: Tensor, v_BMHD: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, these included, as views."""
        b, capacity, h, d = self._k.shape
        if torch.is_grad_enabled() and (k_BMHD.requires_grad or v_BMHD.requires_grad):
            raise ValueError("keys that need a gradient do not go into a cache: call under torch.no_grad()")
        expected = (b, k_BMHD.shape[1], h, d)
        if k_BMHD.shape != expected or v_BMHD.shape != expected:
            raise ValueError(
                f"the new keys have shape {tuple(k_BMHD.shape)}, values {tuple(v_BMHD.shape)}; "
                f"this cache takes ({b}, tokens, {h}, {d}): make one for this batch and module"
            )
        stop = self.tokens + k_BMHD.shape[1]
        if stop > capacity:
            raise ValueError(
                f"{stop} tokens do not fit into a cache of {capacity}; make it as long as prompt and answer"
            )
        self._k[:, self.tokens : stop] = k_BMHD
        self._v[:, self.tokens : stop] = v_BMHD
        self.tokens = stop
        return self._k[:, :stop], self._v[:, :stop]


@torch.no_grad()
def attend_to_cached(q_BMHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, plan: Plan, pool: Pool | None) -> Tensor:
    """Causal attention of the last M of N tokens to all of them: the last M rows of the whole attention.

    A token costs what its segments hold, w / r keys a branch and head, however many came before.
    """
    assert plan.causal
    new, n = q_BMHD.shape[1], k_BNHD.shape[1]
    queries, keys = (Chunk(n - new, new),), (Chunk(0, n - new), Chunk(n - new, new))
    work = accumulation_dtype(q_BMHD.dtype)
    with ExitStack() as held, full_precision(q_BMHD):
        out_BMHD = held.enter_context(accumulator(q_BMHD, work, pool))
        lse_BMH = q_BMHD.new_full(q_BMHD.shape[:3], -math.inf, dtype=lse_dtype(q_BMHD.dtype))
        inputs = Inputs(q_BMHD, k_BNHD, v_BNHD)
        DilatedWork(plan).forward(inputs, queries, keys, Softmax(out_BMHD, lse_BMH), pool)
        return out_BMHD.to(q_BMHD.dtype)
