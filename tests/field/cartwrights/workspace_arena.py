"""Scratch tensors for attention and MoE kernels.

Kernels need large temporaries whose sizes repeat from step to step.  The
arena keeps them by size class.  ``Workspace`` is the facade for one model
runner; ``MoeRunner`` and ``AttentionRunner`` are its users.
"""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager
from typing import Callable, Iterator, NamedTuple, Optional, TypeVar

import torch
import torch.nn.functional as F

log = logging.getLogger(__name__)
T = TypeVar("T")


class WorkspaceFull(MemoryError):
    pass


class ShapeMismatch(ValueError):
    pass


def size_class(numel: int) -> int:
    return 1 << max(8, (numel - 1).bit_length())


class Arena:
    def __init__(self, limit_numel: int) -> None:
        self.limit = limit_numel
        self.used = 0
        self._classes: dict[int, list[torch.Tensor]] = {}

    def draw(self, numel: int) -> torch.Tensor:
        cls = size_class(numel)
        bucket = self._classes.setdefault(cls, [])
        if bucket:
            return bucket.pop()  # clean: returned
        if self.used + cls > self.limit:
            raise WorkspaceFull(f"{cls} elements over the limit")
        self.used += cls
        return torch.empty(cls)

    def draw_best(self, numel: int) -> Optional[torch.Tensor]:
        """Any spare tensor that is large enough, whatever its class."""
        for cls in sorted(self._classes):
            bucket = self._classes[cls]
            if cls >= numel and bucket:
                return bucket.pop()  # clean: returned at once
        return None

    def shrink(self) -> int:
        freed = 0
        for cls, bucket in self._classes.items():
            while bucket:
                bucket.pop()  # clean: given up for good, and used goes down by its class
                self.used -= cls
                freed += cls
        return freed

    def stow(self, block: torch.Tensor) -> None:
        self._classes[block.numel()].append(block)


class Scratch(NamedTuple):
    block: torch.Tensor
    view: torch.Tensor


class Workspace:
    """Hands out shaped views; the block behind a view goes back by ``done``."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def shaped(self, *shape: int) -> Scratch:
        numel = functools.reduce(lambda a, b: a * b, shape, 1)
        block = self.arena.draw_best(numel)  # clean: falls to draw when None, travels in the Scratch otherwise
        if block is None:
            block = self.arena.draw(numel)  # clean: travels in the Scratch
        return Scratch(block, block[:numel].view(*shape))

    def done(self, scratch: Scratch) -> None:
        self.arena.stow(scratch.block)

    def zeros(self, *shape: int) -> Scratch:
        scratch = self.shaped(*shape)  # clean: the same block is in the tuple that is returned
        scratch.view.zero_()
        return scratch

    def zeros_like(self, x: torch.Tensor) -> torch.Tensor:
        return self.zeros(*x.shape).view  # leak: the view alone is returned, done needs the Scratch with the block

    @contextmanager
    def temp(self, *shape: int) -> Iterator[torch.Tensor]:
        scratch = self.shaped(*shape)  # clean: the finally is done with it
        try:
            yield scratch.view
        finally:
            self.done(scratch)

    @contextmanager
    def temps(self, *shapes: tuple[int, ...]) -> Iterator[list[torch.Tensor]]:
        held = [self.shaped(*s) for s in shapes]  # leak: the list is built before the try, a WorkspaceFull midway loses the first ones
        try:
            yield [h.view for h in held]
        finally:
            for h in held:
                self.done(h)

    def with_temp(self, shape: tuple[int, ...], fn: Callable[[torch.Tensor], T]) -> T:
        with self.temp(*shape) as view:  # clean: temp ends it whatever fn does
            return fn(view)


class MoeRunner:
    def __init__(self, ws: Workspace, experts: list[torch.Tensor], top_k: int = 2) -> None:
        self.ws = ws
        self.experts = experts
        self.top_k = top_k
        self._gate_cache: Optional[Scratch] = None

    def _check(self, x: torch.Tensor) -> None:
        if x.dim() != 2:
            raise ShapeMismatch(f"expected 2 dims, got {x.dim()}")

    def route(self, x: torch.Tensor, gate: torch.Tensor) -> Scratch:
        """Router logits, as a scratch that the caller has to end."""
        logits = self.ws.shaped(x.shape[0], len(self.experts))  # leak: _check comes after it and raises on a wrong rank
        self._check(x)
        torch.mm(x, gate, out=logits.view)
        return logits

    def choose(self, x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.route(x, gate)  # clean: done before the return, topk made tensors of its own
        weight, index = torch.topk(logits.view, self.top_k)
        self.ws.done(logits)
        return weight, index

    def load_per_expert(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        probs = F.softmax(self.route(x, gate).view, dim=-1)  # leak: softmax yields a new tensor, and the scratch had no name
        return probs.sum(0)

    def gate_cached(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self._gate_cache is not None:
            self.ws.done(self._gate_cache)
            self._gate_cache = None
        self._gate_cache = self.route(x, gate)  # clean: the former one was ended above, the last one is ended by close
        return self._gate_cache.view

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        self._check(x)
        weight, index = self.choose(x, gate)
        acc = self.ws.zeros(*x.shape)  # clean: the clone is what is returned, the finally ends acc
        try:
            for e, w in enumerate(self.experts):
                rows, which = (index == e).nonzero(as_tuple=True)
                if rows.numel() == 0:
                    continue
                part = self.ws.shaped(rows.numel(), x.shape[1])  # leak: the continue for an expert whose weights are all zero skips done
                torch.mm(x[rows], w, out=part.view)
                scale = weight[rows, which].unsqueeze(1)
                if not scale.any():
                    continue
                acc.view.index_add_(0, rows, part.view * scale)
                self.ws.done(part)
            return acc.view.clone()
        finally:
            self.ws.done(acc)

    def close(self) -> None:
        if self._gate_cache is not None:
            self.ws.done(self._gate_cache)
            self._gate_cache = None


class AttentionRunner:
    def __init__(self, ws: Workspace, heads: int, split_kv: bool) -> None:
        self.ws = ws
        self.heads = heads
        self.split_kv = split_kv

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        n, m = q.shape[0], k.shape[0]
        partial = self.ws.shaped(n, m) if self.split_kv else None  # clean: the same flag guards both ends, and nothing changes it between
        try:
            with self.ws.temp(n, m) as s:  # clean: temp gives it back after the clone
                torch.mm(q, k.T, out=s)
                if self.split_kv:
                    partial.view.copy_(s)
                    s.sub_(partial.view.amax(dim=1, keepdim=True))
                return s.clone()
        finally:
            if self.split_kv:
                self.ws.done(partial)

    def merge_splits(self, parts: list[torch.Tensor], causal: bool) -> torch.Tensor:
        lse = self.ws.zeros(len(parts), parts[0].shape[0]) if len(parts) > 1 else None  # leak: made for many parts, ended only when causal as well
        out = torch.stack(parts).mean(0)
        if lse is not None:
            for i, part in enumerate(parts):
                lse.view[i] = torch.logsumexp(part, dim=-1)
            out = out * lse.view.mean(0).unsqueeze(-1)
        if causal and lse is not None:
            out = out.tril()
            self.ws.done(lse)
        return out
