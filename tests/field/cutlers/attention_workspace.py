"""Split-KV attention with scratch tensors from a workspace pool."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional, Sequence

try:
    import torch
except ImportError:
    torch = None


def _new(numel: int):
    if torch is not None:
        return torch.zeros(numel)
    return [0.0] * numel


def _clone(t):
    return t.clone() if hasattr(t, "clone") else list(t)


class WorkspacePool:
    """Buckets of equally sized scratch tensors. take() / give()."""

    def __init__(self, max_per_bucket: int = 8) -> None:
        self.max_per_bucket = max_per_bucket
        self._buckets: dict[int, list] = {}
        self.outstanding = 0

    @staticmethod
    def bucket(numel: int) -> int:
        return 1 << max(0, math.ceil(math.log2(max(1, numel))))

    def take(self, numel: int):
        size = self.bucket(numel)
        stack = self._buckets.setdefault(size, [])
        t = stack.pop() if stack else _new(size)
        self.outstanding += 1
        return t

    def give(self, t) -> None:
        self.outstanding -= 1
        stack = self._buckets.setdefault(len(t), [])
        if len(stack) < self.max_per_bucket:
            stack.append(t)

    def take_zeroed(self, numel: int):
        t = self.take(numel)  # clean: returned to the caller
        for i in range(len(t)):
            t[i] = 0.0
        return t


@dataclass
class SplitPlan:
    num_splits: int
    head_dim: int
    use_lse: bool = True
    fused_reduce: bool = False


class SplitAttention:
    def __init__(self, pool: WorkspacePool, plan: SplitPlan) -> None:
        self.pool = pool
        self.plan = plan
        self._lse = None

    def _partial(self, q: Sequence[float], split: int):
        """Pooled tensor with this split's unnormalised output; the caller gives it back."""
        out = self.pool.take_zeroed(self.plan.head_dim)  # clean: returned to the caller
        for i, v in enumerate(q):
            out[i] = v * (split + 1)
        return out

    def _partial_or_none(self, q: Sequence[float], split: int):
        if not q:
            return None
        return self._partial(q, split)  # clean: returned to the caller

    def preview(self, q: Sequence[float]) -> list:
        """First split only, for the debug endpoint."""
        return _clone(self._partial(q, 0))  # leak: the pooled tensor is copied and dropped

    def preview_scaled(self, q: Sequence[float], scale: float) -> list:
        part = self._partial(q, 0)  # clean: copied, then given back
        out = [x * scale for x in part]
        self.pool.give(part)
        return out

    def reduce(self, q: Sequence[float]) -> list:
        acc = self._partial(q, 0)  # clean: near miss, accumulated in place and given back at the end
        for s in range(1, self.plan.num_splits):
            part = self._partial(q, s)  # clean: given back in the same turn
            for i in range(len(acc)):
                acc[i] += part[i]
            self.pool.give(part)
        out = _clone(acc)
        self.pool.give(acc)
        return out

    def reduce_tree(self, q: Sequence[float]) -> list:
        acc = self._partial(q, 0)  # leak: rebound to the sum in the loop, the former tensor is lost
        for s in range(1, self.plan.num_splits):
            part = self._partial(q, s)  # clean: given back after the add
            total = self.pool.take(self.plan.head_dim)  # leak: becomes acc and is lost when the next turn rebinds acc
            for i in range(len(total)):
                total[i] = acc[i] + part[i]
            self.pool.give(part)
            acc = total
        out = _clone(acc)
        self.pool.give(acc)
        return out

    def reduce_pingpong(self, q: Sequence[float]) -> list:
        src = self._partial(q, 0)  # clean: near miss, swapped with dst, both given back
        dst = self.pool.take(self.plan.head_dim)  # clean: near miss, swapped with src, both given back
        for s in range(1, self.plan.num_splits):
            for i in range(len(src)):
                dst[i] = src[i] * s
            src, dst = dst, src
        out = _clone(src)
        self.pool.give(dst)
        self.pool.give(src)
        return out

    def forward(self, q: Sequence[float]) -> list:
        lse = None
        if self.plan.use_lse:
            lse = self.pool.take(self.plan.num_splits)  # clean: near miss, the same flag guards take and give
        out = self.reduce(q)
        if self.plan.use_lse:
            for i in range(self.plan.num_splits):
                lse[i] = math.log(1.0 + abs(out[0]))
            self.pool.give(lse)
        return out

    def forward_fused(self, q: Sequence[float]) -> list:
        tmp = None
        if self.plan.use_lse:
            tmp = self.pool.take(self.plan.num_splits)  # leak: taken under use_lse, given back only under fused_reduce
        out = self.preview_scaled(q, 1.0)
        if self.plan.fused_reduce and tmp is not None:
            self.pool.give(tmp)
        return out

    def begin(self) -> None:
        if self.plan.use_lse:
            self._lse = self.pool.take_zeroed(self.plan.num_splits)  # clean: near miss, end() gives it back under the same flag

    def end(self) -> Optional[list]:
        if not self.plan.use_lse:
            return None
        out = _clone(self._lse)
        self.pool.give(self._lse)
        self._lse = None
        return out

    def softmax_inplace(self, scores: list) -> list:
        buf = self.pool.take(len(scores))  # leak: the all-masked row returns before give
        m = max(scores)
        if m == float("-inf"):
            return [0.0] * len(scores)
        for i, s in enumerate(scores):
            buf[i] = math.exp(s - m)
        z = sum(float(buf[i]) for i in range(len(scores)))
        out = [float(buf[i]) / z for i in range(len(scores))]
        self.pool.give(buf)
        return out

    def masked(self, q: Sequence[float], mask: Sequence[bool]) -> list:
        part = self._partial_or_none(q, 0)  # clean: near miss, None is left alone, else given back
        if part is None:
            return []
        out = [float(x) if keep else 0.0 for x, keep in zip(part, mask)]
        self.pool.give(part)
        return out


def attend_until(attn: SplitAttention, queries: list[list[float]], limit: float) -> list:
    best = None
    for q in queries:
        cur = attn.pool.take_zeroed(len(q))  # leak: the break on the limit leaves cur out
        for i, v in enumerate(q):
            cur[i] = v
        if float(cur[0]) > limit:
            break
        best = _clone(cur)
        attn.pool.give(cur)
    return best or []
