"""Expert-parallel workspaces: scratch tensors cached by shape, and a permit for each all-to-all."""
from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from typing import Iterator, Optional

import torch
import torch.distributed as dist

_lock = threading.Lock()
_cache: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = defaultdict(list)
_loaned = 0
MAX_LOANED = 512


def ws_get(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A scratch tensor, to be given to ws_put()."""
    global _loaned
    with _lock:
        _loaned += 1
        if _cache[shape, dtype]:
            return _cache[shape, dtype].pop()
    return torch.empty(shape, dtype=dtype, device="cuda")


def ws_put(t: torch.Tensor) -> None:
    global _loaned
    with _lock:
        _loaned -= 1
        _cache[tuple(t.shape), t.dtype].append(t)


def ws_try(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Optional[torch.Tensor]:
    if _loaned >= MAX_LOANED:
        return None
    return ws_get(shape, dtype)  # clean: returned to the caller


@contextlib.contextmanager
def workspace(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[torch.Tensor]:
    t = ws_get(shape, dtype)  # clean: put in the finally of the context manager
    try:
        yield t
    finally:
        ws_put(t)


class Scratch:
    """Collects workspaces; __exit__ puts them all."""

    def __init__(self, keep_on_error: bool = False):
        self.held: list[torch.Tensor] = []
        self.keep_on_error = keep_on_error

    def __enter__(self) -> "Scratch":
        return self

    def get(self, *shape: int) -> torch.Tensor:
        t = ws_get(shape)  # clean: near miss, held is emptied by __exit__ on every way
        self.held.append(t)
        return t

    def __exit__(self, exc_type, exc, tb) -> bool:
        while self.held:
            ws_put(self.held.pop())
        return False


class RouteScratch:
    def __init__(self, tokens: int, experts: int):
        self.shape = (tokens, experts)
        self.probs: Optional[torch.Tensor] = None
        self.counts: Optional[torch.Tensor] = None

    def __enter__(self) -> "RouteScratch":
        self.probs = ws_get(self.shape)  # leak: __exit__ returns on an exception before it is put
        self.counts = ws_get((self.shape[1],), torch.int32)  # leak: __exit__ returns on an exception before it is put
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        if exc_type is not None:
            self.probs = self.counts = None
            return
        ws_put(self.probs)
        ws_put(self.counts)


class MoELayer(torch.nn.Module):
    def __init__(self, dim: int, experts: int, group=None, fuse: bool = True):
        super().__init__()
        self.dim = dim
        self.experts = experts
        self.group = group
        self.fuse = fuse
        self.gate = torch.nn.Linear(dim, experts, bias=False)
        self.w = torch.nn.Parameter(torch.empty(experts, dim, dim))
        self.a2a = threading.Semaphore(2)

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        out = ws_get((x.shape[0], self.experts))  # clean: returned to the caller
        torch.mm(x, self.gate.weight.t(), out=out)
        return out

    def route(self, x: torch.Tensor, k: int) -> torch.Tensor:
        scores = self._scores(x)  # clean: put after the top-k is copied out
        idx = scores.topk(k, dim=-1).indices
        ws_put(scores)
        return idx

    def load_balance(self, x: torch.Tensor) -> torch.Tensor:
        probs = self._scores(x).softmax(-1)  # leak: softmax makes a new tensor, the pooled scores are dropped
        return (probs.mean(0) * self.experts).pow(2).sum()

    def route_with_jitter(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        scores = self._scores(x)  # clean: near miss, name is rebound but raw keeps the tensor and puts it
        raw = scores
        if eps > 0:
            scores = scores + torch.rand_like(scores) * eps
        idx = scores.argmax(-1)
        ws_put(raw)
        return idx

    def route_masked(self, x: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
        scores = self._scores(x)  # leak: with a mask, ws_put() gets the masked copy instead
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
            return scores.argmax(-1)
        idx = scores.argmax(-1)
        ws_put(scores)
        return idx

    def dispatch(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        self.a2a.acquire()  # clean: released in finally
        try:
            recv = ws_try(tuple(x.shape))  # clean: returned to the caller, who puts it
            if recv is None:
                return None
            dist.all_to_all_single(recv, x, group=self.group)
            return recv
        finally:
            self.a2a.release()

    def dispatch_nowait(self, x: torch.Tensor, recv: torch.Tensor) -> bool:
        if not self.a2a.acquire(blocking=False):  # leak: a shape mismatch returns with the permit
            return False
        if recv.shape != x.shape:
            return False
        dist.all_to_all_single(recv, x, group=self.group)
        self.a2a.release()
        return True

    def forward_expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        with workspace(x.shape[0], self.dim) as h:  # clean: put by the with block
            torch.mm(x, self.w[e], out=h)
            return h.relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recv = self.dispatch(x)  # clean: put once the output is computed
        if recv is None:
            return x
        hidden = None
        if self.fuse:
            hidden = ws_get(tuple(x.shape))  # clean: near miss, put under the same flag below
            torch.mm(recv, self.w[0], out=hidden)
        y = recv.clone() if hidden is None else hidden.relu()
        if self.fuse:
            ws_put(hidden)
        ws_put(recv)
        return y

    def combine(self, parts: list[torch.Tensor]) -> torch.Tensor:
        with Scratch() as s:
            acc = s.get(*parts[0].shape)  # clean: held by the scratch until its exit
            acc.zero_()
            for p in parts:
                acc.add_(p)
            return acc.clone()

    def probe(self, sizes: list[int]) -> int:
        best = 0
        for n in sizes:
            t = ws_try((n, self.dim))  # leak: tensors of odd n break out of the loop unput
            if t is None:
                break
            if n % 2:
                break
            best = max(best, n)
            ws_put(t)
        return best
