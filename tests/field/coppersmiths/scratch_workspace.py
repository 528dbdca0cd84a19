"""Shape-keyed tensor workspace used by the eager fallbacks of our kernels."""
from collections import defaultdict
from contextlib import contextmanager
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F

Key = Tuple[Tuple[int, ...], torch.dtype]


class Workspace:
    def __init__(self, device: str = "cuda", cap_bytes: int = 1 << 32):
        self.device = device
        self.cap = cap_bytes
        self.in_use = 0
        self._shelf: Dict[Key, List[torch.Tensor]] = defaultdict(list)

    def lend(self, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        key = (tuple(shape), dtype)
        shelf = self._shelf[key]
        t = shelf.pop() if shelf else torch.empty(shape, dtype=dtype, device=self.device)
        self.in_use += t.numel() * t.element_size()
        return t

    def lend_or_none(self, *shape: int, dtype: torch.dtype = torch.float16) -> Optional[torch.Tensor]:
        if self.in_use >= self.cap:
            return None
        return self.lend(*shape, dtype=dtype)  # clean: returned to the caller

    def restore(self, t: torch.Tensor) -> None:
        self.in_use -= t.numel() * t.element_size()
        self._shelf[(tuple(t.shape), t.dtype)].append(t)

    @contextmanager
    def borrowed(self, *shape: int, dtype: torch.dtype = torch.float16):
        t = self.lend(*shape, dtype=dtype)  # clean: restored in finally
        try:
            yield t
        finally:
            self.restore(t)

    def lend_zeros(self, *shape: int) -> torch.Tensor:
        t = self.lend(*shape)  # clean: zeroed and returned to the caller
        t.zero_()
        return t

    def lend_like(self, ref: torch.Tensor, contiguous: bool = True) -> torch.Tensor:
        t = self.lend(*ref.shape, dtype=ref.dtype)  # leak: the strided case returns a new tensor and drops t
        if not contiguous:
            return torch.empty_strided(ref.shape, ref.stride(), dtype=ref.dtype, device=ref.device)
        return t


ws = Workspace()


def _gelu_into_scratch(x: torch.Tensor) -> torch.Tensor:
    out = ws.lend(*x.shape, dtype=x.dtype)  # clean: returned, the caller restores it
    out.copy_(F.gelu(x))
    return out


def mlp(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    h = _gelu_into_scratch(x @ w1)  # clean: restored after the second matmul
    y = h @ w2
    ws.restore(h)
    return y


def mlp_residual(x: torch.Tensor, w1: torch.Tensor) -> torch.Tensor:
    act = _gelu_into_scratch(x @ w1).clone()  # leak: pooled tensor is cloned and dropped
    return act + x


def mlp_to_cpu(x: torch.Tensor, w1: torch.Tensor) -> torch.Tensor:
    h = _gelu_into_scratch(x @ w1)  # leak: rebound to the cpu copy
    h = h.to("cpu")
    return h


def gated(x: torch.Tensor, wg: torch.Tensor, wu: torch.Tensor) -> torch.Tensor:
    g = _gelu_into_scratch(x @ wg)  # clean: near miss, name is reused only after restore
    u = x @ wu
    res = g * u
    ws.restore(g)
    g = res.contiguous()
    return g


def softmax_chunks(scores: torch.Tensor, chunk: int) -> torch.Tensor:
    acc = torch.zeros_like(scores)
    for start in range(0, scores.shape[0], chunk):
        part = scores[start:start + chunk]
        buf = ws.lend(*part.shape, dtype=part.dtype)  # leak: an all-masked chunk continues without restore
        buf.copy_(part)
        row_max = buf.amax(dim=-1, keepdim=True)
        if torch.isinf(row_max).all():
            continue
        buf.sub_(row_max).exp_()
        acc[start:start + chunk] = buf / buf.sum(-1, keepdim=True)
        ws.restore(buf)
    return acc


def attention(q: torch.Tensor, k: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
    s = ws.lend(q.shape[0], k.shape[0], dtype=q.dtype)  # clean: restored after softmax
    torch.matmul(q, k.t(), out=s)
    bias = None
    if mask is not None:
        bias = ws.lend(*mask.shape, dtype=q.dtype)  # clean: near miss, restored under the same guard
        bias.zero_().masked_fill_(mask, float("-inf"))
        s.add_(bias)
    p = torch.softmax(s, dim=-1)
    if mask is not None:
        ws.restore(bias)
    ws.restore(s)
    return p


def layernorm(x: torch.Tensor, gamma: torch.Tensor, fused: bool) -> torch.Tensor:
    tmp = None
    if not fused:
        tmp = ws.lend(*x.shape, dtype=torch.float32)  # leak: restored only for half inputs
        tmp.copy_(x)
    src = x if tmp is None else tmp
    out = F.layer_norm(src, (x.shape[-1],)).to(x.dtype) * gamma
    if tmp is not None and x.dtype == torch.float16:
        ws.restore(tmp)
    return out


def quantize(x: torch.Tensor) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
    q = ws.lend_or_none(*x.shape, dtype=torch.int8)  # clean: returned with scale, or restored
    if q is None:
        return None
    scale = ws.lend_or_none(x.shape[0], 1, dtype=torch.float32)  # clean: returned with q
    if scale is None:
        ws.restore(q)
        return None
    scale.copy_(x.abs().amax(dim=1, keepdim=True) / 127)
    q.copy_((x / scale).round())
    return q, scale


def roundtrip_error(x: torch.Tensor) -> Optional[float]:
    pair = quantize(x)  # clean: both members are restored
    if pair is None:
        return None
    q, scale = pair
    err = (q.float() * scale - x).abs().max().item()
    for t in pair:
        ws.restore(t)
    return err


def quantized_matmul(x: torch.Tensor, w: torch.Tensor) -> Optional[torch.Tensor]:
    pair = quantize(x)  # leak: only the int8 half of the pair is restored
    if pair is None:
        return None
    q, scale = pair
    y = (q.to(w.dtype) @ w) * scale
    ws.restore(q)
    return y


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rot = ws.lend(*x.shape, dtype=x.dtype)  # clean: near miss, restored through its alias
    half = x.shape[-1] // 2
    rot[..., :half] = -x[..., half:]
    rot[..., half:] = x[..., :half]
    rotated = rot
    out = x * cos + rotated * sin
    ws.restore(rotated)
    return out
