"""Workspaces for split-KV attention and fused epilogues, taken from a module-wide arena."""
from __future__ import annotations

import threading
from collections import defaultdict

import torch

_GRANULE = 1 << 16


class Arena:
    """Hands out flat byte tensors by size class; `give_back` accepts any view of the same storage."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self._idle: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._out: dict[int, torch.Tensor] = {}
        self._mu = threading.Lock()

    def borrow(self, nbytes: int) -> torch.Tensor:
        size = (nbytes + _GRANULE - 1) // _GRANULE * _GRANULE
        with self._mu:
            stack = self._idle[size]
            flat = stack.pop() if stack else torch.empty(size, dtype=torch.uint8, device=self.device)
            self._out[flat.untyped_storage().data_ptr()] = flat
        return flat

    def give_back(self, view: torch.Tensor) -> None:
        with self._mu:
            flat = self._out.pop(view.untyped_storage().data_ptr())
            self._idle[flat.numel()].append(flat)

    def outstanding(self) -> int:
        return len(self._out)


ARENA = Arena()


def scratch(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    n = 1
    for d in shape:
        n *= d
    itemsize = torch.empty((), dtype=dtype).element_size()
    flat = ARENA.borrow(n * itemsize)  # clean: a view of the same storage is handed to the caller
    return flat[: n * itemsize].view(dtype).view(shape)


def scratch_like(x: torch.Tensor) -> torch.Tensor:
    return scratch(tuple(x.shape), x.dtype)  # clean: handed to the caller


class DecodePlan:
    def __init__(self, n_splits: int, heads: int, dim: int) -> None:
        self.n_splits = n_splits
        self.heads = heads
        self.dim = dim
        self.lse = scratch((n_splits, heads), torch.float32)  # clean: dispose gives it back
        self.acc = scratch((n_splits, heads, dim), torch.float32)  # clean: dispose gives it back
        self.counters = scratch((heads,), torch.int32)  # leak: dispose gives back only lse and acc

    def reset(self) -> None:
        self.counters.zero_()
        self.lse.fill_(float("-inf"))

    def dispose(self) -> None:
        for t in (self.lse, self.acc):
            ARENA.give_back(t)


def partial_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores of one split, in pooled memory: the caller gives it back."""
    out = scratch((q.shape[0], k.shape[0]), q.dtype)  # clean: handed to the caller
    torch.matmul(q, k.t(), out=out)
    return out.mul_(q.shape[-1] ** -0.5)


def attend_with_weights(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
    scores = partial_scores(q, k)  # leak: only a clone leaves, the pooled tensor is dropped
    weights = torch.softmax(scores, dim=-1).clone()
    return weights @ v, weights


def max_score(q: torch.Tensor, k: torch.Tensor) -> float:
    return partial_scores(q, k).max().item()  # leak: the temporary is pooled and nobody keeps it


def merge_splits(q: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    acc = torch.zeros_like(q)
    total = torch.zeros(q.shape[0], 1, device=q.device)
    for k, v in parts:
        s = partial_scores(q, k)  # leak: a fully masked split continues without giving it back
        top = s.amax(dim=-1, keepdim=True)
        if torch.isinf(top).all():
            continue
        w = torch.exp(s - top)
        acc += w @ v
        total += w.sum(dim=-1, keepdim=True)
        ARENA.give_back(s)
    return acc / total


def merge_nonempty(q: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    acc = torch.zeros_like(q)
    for k, v in parts:
        if k.shape[0] == 0:
            continue
        s = partial_scores(q, k)  # clean: near miss, the continue comes before the borrow
        acc += torch.softmax(s, dim=-1) @ v
        ARENA.give_back(s)
    return acc


def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Writes into `out` if there is one; otherwise a pooled tensor the caller gives back."""
    if out is None:
        out = scratch_like(x)  # clean: handed to the caller
    inv = x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    torch.mul(x * inv.to(x.dtype), weight, out=out)
    return out


def residual_block(x: torch.Tensor, w: torch.Tensor, proj: torch.Tensor, buf=None) -> torch.Tensor:
    owned = buf is None
    tmp = scratch_like(x) if owned else buf  # clean: near miss, the same flag guards the give back
    rms_norm(x, w, out=tmp)  # clean: near miss, writes into tmp and takes nothing
    y = x + tmp @ proj
    if owned:
        ARENA.give_back(tmp)
    return y


def gated_block(x: torch.Tensor, w: torch.Tensor, gate: torch.Tensor, buf=None) -> torch.Tensor:
    owned = buf is None
    tmp = scratch_like(x) if owned else buf  # leak: a tensor of our own is kept when the gate is closed
    torch.mul(x, w, out=tmp)
    if not bool(gate.any()):
        return x
    y = x + torch.sigmoid(gate) * tmp
    if owned:
        ARENA.give_back(tmp)
    return y


def two_norms(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    h = rms_norm(x, w1)  # leak: the second norm takes the name, only its tensor is given back
    h = rms_norm(h, w2)  # clean: given back below
    y = x + h
    ARENA.give_back(h)
    return y


def two_norms_inplace(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    h = rms_norm(x, w1)  # clean: near miss, the second norm writes into the same tensor
    h = rms_norm(h, w2, out=h)  # clean: near miss, returns its argument, given back below
    y = x + h
    ARENA.give_back(h)
    return y


def decode_step(q: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    pending: list[torch.Tensor] = []
    outs = []
    for k, v in cache:
        s = partial_scores(q, k)  # clean: collected in pending, which is drained below
        pending.append(s)
        outs.append(torch.softmax(s, dim=-1) @ v)
    result = torch.stack(outs).mean(0)
    while pending:
        ARENA.give_back(pending.pop())
    return result
