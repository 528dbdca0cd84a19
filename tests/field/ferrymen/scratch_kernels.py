"""Scratch memory for fused kernels: one arena per device, and the kernels that use it."""
from __future__ import annotations

import contextlib
import math
import os
import threading
from typing import Iterator, NamedTuple, Optional

import torch

_LIMIT = int(os.environ.get("SCRATCH_LIMIT_MB", "512")) << 20
_ALIGN = 512
_mu = threading.RLock()
_arenas: dict[int, "_Arena"] = {}
_saved: dict[str, "Span"] = {}


class Span(NamedTuple):
    device: int
    page: int
    nbytes: int


class _Arena:
    def __init__(self, device: int) -> None:
        self.device = device
        self.slab = torch.empty(_LIMIT, dtype=torch.uint8, device=f"cuda:{device}")
        self.used: dict[int, int] = {}

    def first_fit(self, nbytes: int) -> int:
        at = 0
        for start in sorted(self.used):
            if start - at >= nbytes:
                break
            at = start + self.used[start]
        return at if at + nbytes <= _LIMIT else -1


def _arena(device: int) -> _Arena:
    with _mu:
        if device not in _arenas:
            _arenas[device] = _Arena(device)
        return _arenas[device]


def scratch_get(device: int, nbytes: int) -> Optional[Span]:
    """A span of scratch memory, or None. Pair with scratch_drop."""
    nbytes = -(-nbytes // _ALIGN) * _ALIGN
    arena = _arena(device)
    with _mu:
        at = arena.first_fit(nbytes)
        if at < 0:
            return None
        arena.used[at] = nbytes
    return Span(device, at, nbytes)


def scratch_drop(span: Span) -> None:
    with _mu:
        _arenas[span.device].used.pop(span.page)


def scratch_tensor(span: Span, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    raw = _arenas[span.device].slab[span.page:span.page + span.nbytes]
    return raw.view(dtype)[:math.prod(shape)].view(shape)


@contextlib.contextmanager
def scratch(device: int, nbytes: int) -> Iterator[Optional[Span]]:
    span = scratch_get(device, nbytes)  # clean: dropped in finally
    try:
        yield span
    finally:
        if span is not None:
            scratch_drop(span)


def scratch_largest(device: int, sizes: list[int]) -> Optional[Span]:
    """The largest of the sizes that fits, found from below."""
    best: Optional[Span] = None
    for nbytes in sorted(sizes):
        span = scratch_get(device, nbytes)  # leak: each larger span replaces the smaller, which stays used
        if span is None:
            break
        best = span
    return best


# kernels ---------------------------------------------------------------------------------------------------
def fused_layernorm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    rows = x.shape[0]
    with scratch(x.device.index, rows * 8) as span:  # clean: the manager drops it
        if span is None:
            return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, None, eps)
        stats = scratch_tensor(span, (2, rows), torch.float32)
        stats[0] = x.mean(-1)
        stats[1] = x.var(-1, unbiased=False)
        return (x - stats[0, :, None]) * (stats[1, :, None] + eps).rsqrt() * weight


def fused_softmax(x: torch.Tensor, inplace: bool) -> torch.Tensor:
    span = scratch_get(x.device.index, x.numel() * 4)  # leak: the in-place way returns without a drop
    if span is None:
        return x.softmax(-1)
    work = scratch_tensor(span, tuple(x.shape), torch.float32)
    torch.sub(x, x.amax(-1, keepdim=True), out=work)
    work.exp_()
    if inplace:
        return x.copy_(work / work.sum(-1, keepdim=True))
    out = work / work.sum(-1, keepdim=True)
    scratch_drop(span)
    return out


def _topk_values(x: torch.Tensor, k: int) -> Optional[Span]:
    """Sorted values of each row in scratch; the caller drops the span."""
    span = scratch_get(x.device.index, x.shape[0] * k * x.element_size())  # clean: the caller's
    if span is not None:
        scratch_tensor(span, (x.shape[0], k), x.dtype).copy_(x.topk(k, -1).values)
    return span


def topk_margin(x: torch.Tensor) -> torch.Tensor:
    span = _topk_values(x, 2)  # leak: the margin is a fresh tensor, the span stays
    if span is None:
        top = x.topk(2, -1).values
        return top[:, 0] - top[:, 1]
    pair = scratch_tensor(span, (x.shape[0], 2), x.dtype)
    return pair[:, 0] - pair[:, 1]


def segment_reduce(x: torch.Tensor, bounds: list[tuple], owned: Optional[Span] = None) -> torch.Tensor:
    """Sum per segment; works in the caller's span when one is given."""
    span = owned
    if owned is None:
        span = scratch_get(x.device.index, len(bounds) * x.shape[1] * 4)  # clean: near miss, same test
        if span is None:
            return torch.stack([x[a:b].sum(0) for a, b in bounds])
    sums = scratch_tensor(span, (len(bounds), x.shape[1]), torch.float32)
    for i, (a, b) in enumerate(bounds):
        sums[i] = x[a:b].float().sum(0)
    out = sums.to(x.dtype)
    if owned is None:
        scratch_drop(span)
    return out


def two_pass_variance(x: torch.Tensor) -> Optional[torch.Tensor]:
    device = x.device.index
    means = scratch_get(device, x.shape[1] * 4)  # leak: stays used when the second span is refused
    if means is None:
        return None
    diffs = scratch_get(device, x.numel() * 4)  # clean: dropped at the end
    if diffs is None:
        return None
    mu = scratch_tensor(means, (x.shape[1],), torch.float32)
    mu.copy_(x.float().mean(0))
    d = scratch_tensor(diffs, tuple(x.shape), torch.float32)
    torch.sub(x.float(), mu, out=d)
    out = (d * d).mean(0)
    scratch_drop(diffs)
    scratch_drop(means)
    return out


def two_pass_skew(x: torch.Tensor) -> Optional[torch.Tensor]:
    with contextlib.ExitStack() as stack:
        spans = []
        for nbytes in (x.shape[1] * 4, x.numel() * 4):
            span = scratch_get(x.device.index, nbytes)  # clean: near miss, the exit stack drops it
            if span is None:
                return None
            stack.callback(scratch_drop, span)
            spans.append(span)
        mu = scratch_tensor(spans[0], (x.shape[1],), torch.float32)
        mu.copy_(x.float().mean(0))
        d = scratch_tensor(spans[1], tuple(x.shape), torch.float32)
        torch.sub(x.float(), mu, out=d)
        return (d ** 3).mean(0)


class DropoutMask:
    """One microbatch's dropout: the mask is kept in scratch from apply() to unapply()."""

    def __init__(self, p: float) -> None:
        self.p = p
        self.span: Optional[Span] = None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if self.span is not None:
            raise RuntimeError("the mask of the last microbatch is still in use")
        self.span = scratch_get(x.device.index, x.numel())  # clean: near miss, unapply() drops it
        if self.span is None:
            return x
        mask = scratch_tensor(self.span, tuple(x.shape), torch.uint8)
        mask.bernoulli_(1.0 - self.p)
        return x * mask / (1.0 - self.p)

    def unapply(self, grad: torch.Tensor) -> torch.Tensor:
        span, self.span = self.span, None
        if span is None:
            return grad
        out = grad * scratch_tensor(span, tuple(grad.shape), torch.uint8) / (1.0 - self.p)
        scratch_drop(span)
        return out


def stash(name: str, x: torch.Tensor) -> bool:
    span = scratch_get(x.device.index, x.numel() * x.element_size())  # leak: a second stash overwrites it
    if span is None:
        return False
    scratch_tensor(span, tuple(x.shape), x.dtype).copy_(x)
    _saved[name] = span
    return True


def unstash(name: str, shape: tuple, dtype: torch.dtype) -> Optional[torch.Tensor]:
    span = _saved.pop(name, None)
    if span is None:
        return None
    out = scratch_tensor(span, shape, dtype).clone()
    scratch_drop(span)
    return out


def reserve_workspaces(device: int, sizes: dict[str, int]) -> dict[str, Span]:
    """Named workspaces for a step; end_step gives them back."""
    spaces = {}
    for name, nbytes in sizes.items():
        span = scratch_get(device, nbytes)  # clean: near miss, handed over in the dict
        if span is not None:
            spaces[name] = span
    return spaces


def end_step(spaces: dict[str, Span]) -> None:
    for span in spaces.values():
        scratch_drop(span)
    spaces.clear()


def run_step(device: int, x: torch.Tensor, layers: list) -> torch.Tensor:
    spaces = reserve_workspaces(device, {"attn": x.numel() * 4, "mlp": x.numel() * 16})  # clean: ended below
    for layer in layers:
        x = layer(x, spaces.get("attn"), spaces.get("mlp"))
    end_step(spaces)
    return x


def dry_step(device: int, x: torch.Tensor, layers: list) -> bool:
    """Would a step of this size have its workspaces?"""
    spaces = reserve_workspaces(device, {"attn": x.numel() * 4, "mlp": x.numel() * 16})  # leak: only counted
    return len(spaces) == 2 and bool(layers)
