"""Blocked attention as an autograd function, workspaces reserved from an arena."""
from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

try:
    import torch
    Function = torch.autograd.Function
except ImportError:
    torch = None
    Function = object


class WorkspaceArena:
    """Preallocated byte workspaces; reserve raises when they are used up, maybe_reserve does not."""

    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._spare: List[bytearray] = [bytearray(nbytes) for _ in range(count)]
        self._reserved: Dict[int, bytearray] = {}

    def reserve(self) -> bytearray:
        if not self._spare:
            raise MemoryError("workspace arena exhausted")
        ws = self._spare.pop()
        self._reserved[id(ws)] = ws
        return ws

    def maybe_reserve(self) -> Optional[bytearray]:
        if not self._spare:
            return None
        return self.reserve()  # clean: handed on to the caller

    def unreserve(self, ws: bytearray) -> None:
        self._spare.append(self._reserved.pop(id(ws)))

    @property
    def reserved(self) -> int:
        return len(self._reserved)


ARENA = WorkspaceArena(64, 4096)


def softmax(row: Sequence[float]) -> List[float]:
    top = max(row)
    e = [math.exp(x - top) for x in row]
    z = sum(e)
    return [x / z for x in e]


class Ctx:
    """The parts of the autograd context that we use, for hosts without torch."""

    def __init__(self, needs: Tuple[bool, ...] = (True, True)):
        self.needs_input_grad = needs
        self.saved: Tuple[Any, ...] = ()
        self.ws: Optional[bytearray] = None
        self.stats: Optional[bytearray] = None
        self.owns_stats = False

    def save_for_backward(self, *xs: Any) -> None:
        self.saved = xs


class BlockedAttention(Function):
    @staticmethod
    def forward(ctx, q: Sequence[float], k: Sequence[float]):
        ctx.ws = ARENA.reserve()  # leak: backward returns for inputs without gradient before the unreserve
        for i, x in enumerate(q[: ARENA.nbytes]):
            ctx.ws[i] = int(abs(x)) & 0xFF
        ctx.save_for_backward(q, k)
        return softmax([a * b for a, b in zip(q, k)])

    @staticmethod
    def backward(ctx, grad: Sequence[float]):
        q, k = ctx.saved
        if not any(ctx.needs_input_grad):
            return None, None
        dq = [g * b for g, b in zip(grad, k)] if ctx.needs_input_grad[0] else None
        dk = [g * a for g, a in zip(grad, q)] if ctx.needs_input_grad[1] else None
        ARENA.unreserve(ctx.ws)
        ctx.ws = None
        return dq, dk


class BlockedAttentionStats(Function):
    """Keeps the row statistics for backward unless the caller passes its own workspace."""

    @staticmethod
    def forward(ctx, q: Sequence[float], k: Sequence[float], stats: Optional[bytearray] = None):
        ctx.owns_stats = stats is None
        if ctx.owns_stats:
            stats = ARENA.reserve()  # clean: near miss, ownership is noted in the context, backward tests it
        ctx.stats = stats
        out = softmax([a * b for a, b in zip(q, k)])
        stats[0] = len(out) & 0xFF
        ctx.save_for_backward(q, k)
        return out

    @staticmethod
    def backward(ctx, grad: Sequence[float]):
        q, k = ctx.saved
        try:
            if not any(ctx.needs_input_grad):
                return None, None
            return [g * b for g, b in zip(grad, k)], [g * a for g, a in zip(grad, q)]
        finally:
            if ctx.owns_stats:
                ARENA.unreserve(ctx.stats)
            ctx.stats = None


def split_lse(arena: WorkspaceArena, parts: Sequence[Sequence[float]], out: Optional[bytearray] = None) -> List[float]:
    """Log-sum-exp per part; `out` may be the caller's."""
    own = out is None
    if own:
        out = arena.reserve()  # leak: the return for no parts comes before the test of own
    if not parts:
        return []
    lse = []
    for i, p in enumerate(parts):
        top = max(p)
        lse.append(top + math.log(sum(math.exp(x - top) for x in p)))
        out[i] = 1
    if own:
        arena.unreserve(out)
    return lse


def combine_lse(arena: WorkspaceArena, parts: Sequence[Sequence[float]], out: Optional[bytearray] = None) -> float:
    own = out is None
    if own:
        out = arena.reserve()  # clean: near miss, finally tests the same flag
    try:
        if not parts:
            return float("-inf")
        vals = split_lse(arena, parts, out)
        top = max(vals)
        return top + math.log(sum(math.exp(v - top) for v in vals))
    finally:
        if own:
            arena.unreserve(out)


def backward_scratch(arena: WorkspaceArena) -> Optional[Tuple[bytearray, bytearray]]:
    dq = arena.maybe_reserve()  # leak: dk None returns without the rollback of dq
    if dq is None:
        return None
    dk = arena.maybe_reserve()  # clean: None-checked, returned in the pair
    if dk is None:
        return None
    return dq, dk


class FusedBackward:
    def __init__(self, arena: WorkspaceArena, deterministic: bool):
        self.arena = arena
        self.deterministic = deterministic

    def run(self, grads: Sequence[float]) -> float:
        pair = backward_scratch(self.arena)  # leak: only the first of the pair is unreserved
        if pair is None:
            return sum(grads)
        dq = pair[0]
        for i, g in enumerate(grads):
            dq[i] = int(abs(g)) & 0xFF
        total = float(sum(dq[: len(grads)]))
        self.arena.unreserve(dq)
        return total

    def accumulate(self, grads: Sequence[float], last: bool) -> float:
        if self.deterministic:
            ws = self.arena.reserve()  # leak: unreserved only if it is also the last step
        total = 0.0
        for i, g in enumerate(grads):
            total += g
            if self.deterministic:
                ws[i] = int(abs(g)) & 0xFF
        if self.deterministic and last:
            self.arena.unreserve(ws)
        return total

    def accumulate_pairwise(self, grads: Sequence[float]) -> float:
        if self.deterministic:
            ws = self.arena.reserve()  # clean: near miss, both branches below follow the same flag
        total = 0.0
        for g in grads:
            total += g
        if not self.deterministic:
            return total
        ws[0] = 1
        self.arena.unreserve(ws)
        return total
