"""Dilated (LongNet style) attention with a reusable workspace.

Segments are gathered with a stride, attended densely and scattered back; all temporaries
come from a Workspace so that the caching allocator stays out of the step time.
"""
from __future__ import annotations

from collections import defaultdict
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import torch


class Workspace:
    """Size bucketed free lists. Every tensor from ``get`` goes back through ``put``."""

    def __init__(self, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        self.device = device
        self.dtype = dtype
        self._buckets: Dict[int, List[torch.Tensor]] = defaultdict(list)
        self.live = 0

    @staticmethod
    def _bucket(n: int) -> int:
        return 1 << (n - 1).bit_length()

    def get(self, *shape: int) -> torch.Tensor:
        n = 1
        for s in shape:
            n *= s
        bucket = self._buckets[self._bucket(n)]
        flat = bucket.pop() if bucket else torch.empty(self._bucket(n), device=self.device, dtype=self.dtype)
        self.live += 1
        return flat[:n].view(*shape)

    def put(self, t: torch.Tensor) -> None:
        flat = t._base if t._base is not None else t
        self._buckets[self._bucket(flat.numel())].append(flat)
        self.live -= 1


def gather_segments(ws: Workspace, x: torch.Tensor, seg: int, rate: int, offset: int) -> torch.Tensor:
    """[b, t, h, d] -> [b * t/seg, seg/rate, h, d]; the result is a workspace tensor."""
    b, t, h, d = x.shape
    out = ws.get(b * (t // seg), seg // rate, h, d)  # clean: returned to the caller
    out.copy_(x.view(b * (t // seg), seg, h, d)[:, offset::rate][:, : seg // rate])
    return out


def scatter_segments(dst: torch.Tensor, part: torch.Tensor, seg: int, rate: int, offset: int) -> None:
    b, t, h, d = dst.shape
    dst.view(b * (t // seg), seg, h, d)[:, offset::rate][:, : seg // rate] = part


def dense(ws: Workspace, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Attention inside segments. Output and log-sum-exp are workspace tensors."""
    n, s, h, d = q.shape
    scores = ws.get(n, h, s, s)  # clean: put before return
    torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1), out=scores)
    scores.mul_(d ** -0.5)
    lse = ws.get(n, h, s)  # clean: second element of the result
    torch.logsumexp(scores, dim=-1, out=lse)
    scores.sub_(lse.unsqueeze(-1)).exp_()
    out = ws.get(n, s, h, d)  # clean: first element of the result
    out.copy_(torch.matmul(scores, v.transpose(1, 2)).transpose(1, 2))
    ws.put(scores)
    return out, lse


def branch_output(ws: Workspace, q, k, v, seg: int, rate: int, offset: int) -> torch.Tensor:
    """One (segment, rate) branch, expanded to full length."""
    qs = gather_segments(ws, q, seg, rate, offset)  # clean: put below
    ks = gather_segments(ws, k, seg, rate, offset)  # clean: put below
    vs = gather_segments(ws, v, seg, rate, offset)  # clean: put below
    out, lse = dense(ws, qs, ks, vs)  # leak: the log-sum-exp half of the pair is never put
    for t in (qs, ks, vs):
        ws.put(t)
    full = torch.zeros_like(q)
    scatter_segments(full, out, seg, rate, offset)
    ws.put(out)
    return full


def weighted_branch(ws: Workspace, q, k, v, seg: int, rate: int, offset: int) -> Tuple[torch.Tensor, torch.Tensor]:
    held: List[torch.Tensor] = []
    for x in (q, k, v):
        held.append(gather_segments(ws, x, seg, rate, offset))  # clean: near miss, all members of the list are put
    out, lse = dense(ws, *held)  # clean: both handed to the caller
    while held:
        ws.put(held.pop())
    return out, lse


def dilated_attention(ws: Workspace, q, k, v, plan: Sequence[Tuple[int, int]]) -> torch.Tensor:
    total = torch.zeros_like(q)
    norm = torch.zeros(q.shape[:3], device=q.device)
    for i, (seg, rate) in enumerate(plan):
        if q.shape[1] % seg:
            continue
        out, lse = weighted_branch(ws, q, k, v, seg, rate, i % rate)  # clean: both put at the end of the round
        scatter_segments(total, out, seg, rate, i % rate)
        norm += lse.sum().exp()
        ws.put(lse)
        ws.put(out)
    return total / norm.unsqueeze(-1).clamp_min(1e-6)


def preview(ws: Workspace, x: torch.Tensor, seg: int, rate: int) -> torch.Tensor:
    """Detached copy of what one branch sees, for the attention visualiser."""
    return gather_segments(ws, x, seg, rate, 0).clone()  # leak: only the copy survives


def head_norms(ws: Workspace, x: torch.Tensor, seg: int, rate: int) -> List[float]:
    part = gather_segments(ws, x, seg, rate, 0)  # leak: numbers are read off, tensor dropped
    flat = part.float().pow(2).sum(dim=(0, 1, 3)).sqrt()
    return flat.tolist()


def offsets_sweep(ws: Workspace, x: torch.Tensor, seg: int, rate: int) -> Iterator[torch.Tensor]:
    """Yields each offset's view; the tensor is valid until the next step."""
    for off in range(rate):
        part = gather_segments(ws, x, seg, rate, off)  # clean: near miss, finally runs also on close
        try:
            yield part
        finally:
            ws.put(part)


def best_offset(ws: Workspace, x: torch.Tensor, seg: int, rate: int) -> int:
    best, best_off = float("-inf"), 0
    for off, part in enumerate(offsets_sweep(ws, x, seg, rate)):
        energy = float(part.float().pow(2).mean())
        if energy > best:
            best, best_off = energy, off
    return best_off


class DilatedCache:
    """Keeps gathered keys of the static prompt between decode steps."""

    def __init__(self, ws: Workspace, seg: int, rate: int) -> None:
        self.ws = ws
        self.seg = seg
        self.rate = rate
        self._keys: Optional[torch.Tensor] = None
        self._values: Optional[torch.Tensor] = None

    def rebuild(self, k: torch.Tensor, v: torch.Tensor) -> None:
        if self._keys is not None:
            self.ws.put(self._keys)
        self._keys = gather_segments(self.ws, k, self.seg, self.rate, 0)  # clean: field, the former one is put
        self._values = gather_segments(self.ws, v, self.seg, self.rate, 0)  # leak: the field's former tensor is overwritten

    def clear(self) -> None:
        for name in ("_keys", "_values"):
            t = getattr(self, name)
            if t is not None:
                self.ws.put(t)
                setattr(self, name, None)

    def step(self, q: torch.Tensor) -> Optional[torch.Tensor]:
        qs = gather_segments(self.ws, q, self.seg, self.rate, 0)  # leak: an empty cache returns with the queries
        if self._keys is None:
            return None
        out, lse = dense(self.ws, qs, self._keys, self._values)  # clean: lse put, out copied and put
        self.ws.put(qs)
        self.ws.put(lse)
        res = out.clone()
        self.ws.put(out)
        return res
