"""Saved-tensor hooks that move activations to pinned host memory between forward and backward."""
from __future__ import annotations

import bisect
import itertools
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch


@dataclass(frozen=True, order=True)
class Span:
    offset: int
    nbytes: int


class PinnedArena:
    """First-fit allocator over one pinned allocation."""

    def __init__(self, nbytes: int):
        self.base = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._holes: List[Span] = [Span(0, nbytes)]
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> Optional[Span]:
        nbytes = (nbytes + 511) & ~511
        with self._lock:
            for i, hole in enumerate(self._holes):
                if hole.nbytes >= nbytes:
                    rest = hole.nbytes - nbytes
                    self._holes[i:i + 1] = [Span(hole.offset + nbytes, rest)] if rest else []
                    return Span(hole.offset, nbytes)
        return None

    def free(self, span: Span) -> None:
        with self._lock:
            bisect.insort(self._holes, span)
            merged = [self._holes[0]]
            for hole in self._holes[1:]:
                last = merged[-1]
                if last.offset + last.nbytes == hole.offset:
                    merged[-1] = Span(last.offset, last.nbytes + hole.nbytes)
                else:
                    merged.append(hole)
            self._holes = merged

    def view(self, span: Span, like: torch.Tensor) -> torch.Tensor:
        raw = self.base[span.offset:span.offset + like.numel() * like.element_size()]
        return raw.view(like.dtype).view(like.shape)


@dataclass
class Saved:
    span: Span
    like: torch.Tensor
    layer: int


class OffloadHooks:
    def __init__(self, arena: PinnedArena, min_bytes: int = 1 << 20):
        self.arena = arena
        self.min_bytes = min_bytes
        self._ids = itertools.count()
        self._saved: Dict[int, Saved] = {}
        self._rng: Dict[int, Span] = {}
        self._stats = {"kept": 0, "moved": 0}

    def pack(self, tensor: torch.Tensor, layer: int):
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < self.min_bytes:
            self._stats["kept"] += 1
            return tensor
        span = self.arena.reserve(nbytes)  # clean: kept in _saved, freed by unpack or discard
        if span is None:
            self._stats["kept"] += 1
            return tensor
        self.arena.view(span, tensor).copy_(tensor, non_blocking=True)
        key = next(self._ids)
        self._saved[key] = Saved(span, torch.empty_like(tensor, device="meta"), layer)
        self._stats["moved"] += 1
        return key

    def unpack(self, handle, device="cuda"):
        if isinstance(handle, torch.Tensor):
            return handle
        saved = self._saved.pop(handle)
        out = self.arena.view(saved.span, saved.like).to(device)
        self.arena.free(saved.span)
        return out

    def stash_rng(self, layer: int) -> bool:
        state = torch.cuda.get_rng_state()
        span = self.arena.reserve(state.numel())  # leak: discard clears _rng without freeing the spans
        if span is None:
            return False
        self.arena.view(span, state).copy_(state)
        self._rng[layer] = span
        return True

    def restore_rng(self, layer: int, size: int) -> None:
        span = self._rng.pop(layer, None)
        if span is None:
            return
        state = self.arena.view(span, torch.empty(size, dtype=torch.uint8, device="meta"))
        torch.cuda.set_rng_state(state.clone())
        self.arena.free(span)

    def discard(self) -> int:
        """Drop what an abandoned step saved."""
        dropped = len(self._saved) + len(self._rng)
        for saved in self._saved.values():
            self.arena.free(saved.span)
        self._saved.clear()
        self._rng.clear()
        return dropped

    def compact_pair(self, a: torch.Tensor, b: torch.Tensor) -> Optional[Tuple[Span, Span]]:
        """Place two tensors; the caller owns both spans."""
        first = self.arena.reserve(a.numel() * a.element_size())  # clean: freed, or handed on
        if first is None:
            return None
        second = self.arena.reserve(b.numel() * b.element_size())  # clean: handed to the caller
        if second is None:
            self.arena.free(first)
            return None
        self.arena.view(first, a).copy_(a)
        self.arena.view(second, b).copy_(b)
        return first, second

    def checksum_pair(self, a: torch.Tensor, b: torch.Tensor) -> Optional[int]:
        pair = self.compact_pair(a, b)  # leak: only the first span is freed
        if pair is None:
            return None
        first, _ = pair
        total = int(self.arena.view(first, a).to(torch.int64).sum())
        self.arena.free(first)
        return total

    @contextmanager
    def scratch(self, nbytes: int):
        span = self.arena.reserve(nbytes)  # clean: freed in finally
        try:
            yield span
        finally:
            if span is not None:
                self.arena.free(span)

    @contextmanager
    def scratch_like(self, tensor: torch.Tensor, keep: bool = False):
        span = self.arena.reserve(tensor.numel() * tensor.element_size())  # leak: keep skips free
        yield None if span is None else self.arena.view(span, tensor)
        if span is not None and not keep:
            self.arena.free(span)

    def mean_of(self, tensors: List[torch.Tensor]) -> List[float]:
        out = []
        for tensor in tensors:
            with self.scratch(tensor.numel() * tensor.element_size()) as span:  # clean: with block
                if span is None:
                    continue
                host = self.arena.view(span, tensor)
                host.copy_(tensor)
                out.append(float(host.float().mean()))
        return out


class LayerWindow:
    """Keeps the spans of the last few layers so that recomputation can start from them."""

    def __init__(self, arena: PinnedArena, depth: int):
        self.arena = arena
        self.depth = depth
        self._window: List[Span] = []
        self._anchor: Optional[Span] = None

    def push(self, tensor: torch.Tensor) -> bool:
        span = self.arena.reserve(tensor.numel() * tensor.element_size())  # clean: push or close frees
        if span is None:
            return False
        self.arena.view(span, tensor).copy_(tensor)
        self._window.append(span)
        if len(self._window) > self.depth:
            self.arena.free(self._window.pop(0))
        return True

    def set_anchor(self, tensor: torch.Tensor) -> None:
        span = self.arena.reserve(tensor.numel() * tensor.element_size())  # leak: overwrites the last anchor
        if span is not None:
            self.arena.view(span, tensor).copy_(tensor)
            self._anchor = span

    def advance(self, tensors: List[torch.Tensor]) -> None:
        for i, tensor in enumerate(tensors):
            if i % self.depth == 0:
                self.set_anchor(tensor)
            self.push(tensor)

    def close(self) -> None:
        while self._window:
            self.arena.free(self._window.pop())
        if self._anchor is not None:
            self.arena.free(self._anchor)
            self._anchor = None


def place_all_or_unwind(arena: PinnedArena, tensors: List[torch.Tensor]) -> Optional[List[Span]]:
    spans: List[Span] = []
    for tensor in tensors:
        span = arena.reserve(tensor.numel() * tensor.element_size())  # clean: unwound, or returned
        if span is None:
            for earlier in spans:
                arena.free(earlier)
            return None
        arena.view(span, tensor).copy_(tensor)
        spans.append(span)
    return spans


def footprint(arena: PinnedArena, tensors: List[torch.Tensor]) -> int:
    spans = place_all_or_unwind(arena, tensors)  # leak: only the sizes are used
    return sum(s.nbytes for s in spans or ())
