import math
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SplitKVBuffers:
    """Stack of (partial output, lse) accumulators for split-KV attention."""

    def __init__(self, depth: int, splits: int, rows: int, dim: int) -> None:
        self._stack = [(torch.empty(splits, rows, dim), torch.empty(splits, rows)) for _ in range(depth)]
        self.splits = splits

    def acquire_accum(self) -> Optional[Tuple[Tensor, Tensor]]:
        return self._stack.pop() if self._stack else None

    def release_accum(self, acc: Tuple[Tensor, Tensor]) -> None:
        self._stack.append(acc)

    def acquire_or_resize(self, rows: int) -> Optional[Tuple[Tensor, Tensor]]:
        if not self._stack:
            return None
        o, l = self._stack.pop()  # leak: a pair with too few rows is dropped, a new one is not made
        if o.shape[1] < rows:
            return None
        return o, l

    def enlarge(self, rows: int) -> None:
        for i in range(len(self._stack)):
            o, l = self._stack.pop(0)  # clean: near miss, a larger pair takes the place of the small one in the stack
            if o.shape[1] < rows:
                o = o.new_empty(o.shape[0], rows, o.shape[2])
                l = l.new_empty(l.shape[0], rows)
            self._stack.append((o, l))


class SplitAttention(nn.Module):
    def __init__(self, dim: int, bufs: Optional[SplitKVBuffers]) -> None:
        super().__init__()
        self.scale = dim ** -0.5
        self.bufs = bufs
        self.owned: Optional[Tuple[Tensor, Tensor]] = None

    def _split(self, q: Tensor, k: Tensor, v: Tensor, acc: Tuple[Tensor, Tensor]) -> None:
        o, lse = acc
        n = o.shape[0]
        for i, (kc, vc) in enumerate(zip(k.chunk(n), v.chunk(n))):
            s = (q @ kc.t()) * self.scale
            lse[i, : q.shape[0]] = s.logsumexp(-1)
            o[i, : q.shape[0]] = s.softmax(-1) @ vc

    @staticmethod
    def _combine(acc: Tuple[Tensor, Tensor], rows: int) -> Tensor:
        o, lse = acc
        w = F.softmax(lse[:, :rows], dim=0)
        return (o[:, :rows] * w.unsqueeze(-1)).sum(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.bufs is None:
            return F.scaled_dot_product_attention(q, k, v)
        acc = self.bufs.acquire_accum()  # clean: released after the combination
        if acc is None:
            return F.scaled_dot_product_attention(q, k, v)
        self._split(q, k, v, acc)
        out = self._combine(acc, q.shape[0])
        self.bufs.release_accum(acc)
        return out

    def forward_guarded(self, q: Tensor, k: Tensor, v: Tensor, fast: bool) -> Tensor:
        acc = None
        if self.bufs is not None and fast:
            acc = self.bufs.acquire_accum()  # clean: near miss, released under its own None test, whatever fast was
        if acc is not None:
            self._split(q, k, v, acc)
            out = self._combine(acc, q.shape[0])
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        if acc is not None:
            self.bufs.release_accum(acc)
        return out

    def forward_mixed(self, q: Tensor, k: Tensor, v: Tensor, fast: bool) -> Tensor:
        acc = None
        if self.bufs is not None:
            acc = self.bufs.acquire_accum()  # leak: acquired for every mode, released for the fast one
        if fast and acc is not None:
            self._split(q, k, v, acc)
            out = self._combine(acc, q.shape[0])
            self.bufs.release_accum(acc)
            return out
        return F.scaled_dot_product_attention(q, k, v)

    def attach(self) -> bool:
        if self.bufs is not None and self.owned is None:
            self.owned = self.bufs.acquire_accum()  # clean: near miss, attach skips when owned, detach releases
        return self.owned is not None

    def detach_(self) -> None:
        if self.owned is not None:
            self.bufs.release_accum(self.owned)
            self.owned = None

    def peak_lse(self, q: Tensor, k: Tensor, v: Tensor) -> float:
        o, lse = self.bufs.acquire_accum()  # leak: the pair is unpacked, nothing is released
        self._split(q, k, v, (o, lse))
        return float(lse[:, : q.shape[0]].max())

    def peak_out(self, q: Tensor, k: Tensor, v: Tensor) -> float:
        acc = self.bufs.acquire_accum()  # clean: near miss, tuple elements are used, the tuple itself goes back
        self._split(q, k, v, acc)
        o, _ = acc
        peak = float(o[:, : q.shape[0]].abs().max())
        self.bufs.release_accum(acc)
        return peak

    def forward_rows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        acc = self.bufs.acquire_or_resize(q.shape[0])  # leak: a NaN in the result raises before the release
        if acc is None:
            return F.scaled_dot_product_attention(q, k, v)
        self._split(q, k, v, acc)
        out = self._combine(acc, q.shape[0])
        if math.isnan(float(out.sum())):
            raise FloatingPointError("nan in split attention")
        self.bufs.release_accum(acc)
        return out


def attend_many(attn: SplitAttention, batches, limit: int):
    outs = []
    acc = attn.bufs.acquire_accum()  # clean: near miss, continue stays inside the loop and the release follows it
    if acc is None:
        return outs
    for q, k, v in batches:
        if q.shape[0] > limit:
            continue
        attn._split(q, k, v, acc)
        outs.append(attn._combine(acc, q.shape[0]))
    attn.bufs.release_accum(acc)
    return outs
